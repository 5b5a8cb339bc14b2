"""A cache for several threads: a result that one of them computes is awaited by the others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from threading import Lock
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class SharedCache(Generic[Result]):
    """The last `size` results, by key. An error is raised for all who wait for it, and not
    cached."""

    def __init__(self, size: int) -> None:
        self._size, self._lock = size, Lock()
        self._results: OrderedDict[Hashable, Future[Result]] = OrderedDict()

    def get(self, key: Hashable, compute: Callable[..., Result], *arguments: Any) -> Result:
        """Return the result for `key`, computed from `arguments` if it is not there."""
        with self._lock:
            result = self._results.get(key)
            if own := result is None:
                result = self._results[key] = Future()
            self._results.move_to_end(key)
            while len(self._results) > self._size:
                self._results.popitem(last=False)
        if own:
            try:
                result.set_result(compute(*arguments))
            except BaseException as error:
                with self._lock:
                    if self._results.get(key) is result:
                        del self._results[key]
                result.set_exception(error)
        return result.result()
