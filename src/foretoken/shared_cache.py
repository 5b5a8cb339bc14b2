"""A thread-safe cache: while a thread computes a result, other threads wait for that result."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from threading import Lock
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class SharedCache(Generic[Result]):
    """Caches the `size` most recently used results, by key. An error of the computation is raised
    in all threads that wait for the result, and is not cached."""

    def __init__(self, size: int) -> None:
        self._size, self._lock = size, Lock()
        self._results: OrderedDict[Hashable, Future[Result]] = OrderedDict()

    def get(self, key: Hashable, compute: Callable[..., Result], *arguments: Any) -> Result:
        """Return the cached result for `key`, or else cache and return `compute(*arguments)`."""
        with self._lock:
            result = self._results.get(key)
            if is_new := result is None:
                result = self._results[key] = Future()
            self._results.move_to_end(key)
            while len(self._results) > self._size:
                self._results.popitem(last=False)
        if is_new:
            try:
                result.set_result(compute(*arguments))
            except BaseException as error:
                with self._lock:
                    if self._results.get(key) is result:
                        del self._results[key]
                result.set_exception(error)
        return result.result()
