"""Stochastic speculative execution, outside language models (the paper's Discussion).

A slow f gives a distribution, a slow g takes a sample of it. g is started on guesses, drawn from a
fast approximation q of f, while f still runs; guesses and f's distribution then make one sample
(`finite.sample_law`), which has exactly f's distribution. Decoding is the case in which g is the
next f. `Flag` is an Event that several processes share, by files. Knows no models and no tokens.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import secrets
from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from threading import Event
from time import perf_counter, sleep
from typing import Any, NamedTuple

from foretoken.errors import InputError, one_line, shown, whole
from foretoken.execute import finite
from foretoken.execute.finite import EMPTY, Distribution, finite_distribution
from foretoken.options import as_seed
from foretoken.sampling.keys import Purpose, RowKey, uniform


class Flag:
    """An Event that several processes share: set, for all of them, once its file exists.

    Args:
        path: The file.

    Examples:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> flag = Flag(folder.name + "/stop")
        >>> flag.is_set()
        False
        >>> flag.set()
        >>> flag.wait()
        True
        >>> folder.cleanup()
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def set(self) -> None:
        """Set it, for all processes."""
        with open(self._path, "w"):
            pass

    def is_set(self) -> bool:
        """Tell whether it is set.

        Returns:
            True where it is.
        """
        return os.path.exists(self._path)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set.

        Args:
            timeout: Seconds at most; None is without a limit.

        Returns:
            True where it is set.
        """
        end = None if timeout is None else perf_counter() + timeout
        while not self.is_set() and (end is None or perf_counter() < end):
            sleep(0.002)
        return self.is_set()


COROUTINE = "is a coroutine function; await speculate_async(...) instead"


class Seconds(NamedTuple):
    """Times of a call of `speculate`.

    Side by side on too few cores each takes longer; `guesses=0` times f and g alone.

    Attributes:
        q: Of q, in seconds.
        f: Of f.
        g: Of the g whose value is returned.
        total: Of the whole call.

    Examples:
        >>> speculate(lambda x: {x: 1.0}, lambda y: y, q={3: 1.0}, x=3).seconds.total > 0
        True
    """

    q: float
    f: float
    g: float
    total: float


@dataclass(frozen=True, slots=True)
class Execution:
    """The result of one call of `speculate`.

    Attributes:
        value: g(y).
        y: The sample, whose distribution is f's.
        kept: The number of the guess that y is, from 0; None where no guess was right.
        guesses: The guesses.
        beta: The probability that a guess was right.
        seed: The seed of its draws.
        seconds: Its times.

    Examples:
        >>> result = speculate(lambda x: {x: 1.0}, lambda y: y * 2, q={3: 1.0}, x=3)
        >>> result.value, result.y, result.kept, result.beta
        (6, 3, 0, 1.0)
    """

    value: Any
    y: Any
    kept: int | None
    guesses: tuple[Any, ...]
    beta: float
    seed: int
    seconds: Seconds


def speculate(
    f: Callable[[Any], Any],
    g: Callable[..., Any],
    q: Any,
    x: Any,
    *,
    guesses: int = 1,
    executor: Executor | None = None,
    seed: int | None = 0,
) -> Execution:
    """Return g(y) for y drawn from f(x), with g under way on guesses before f is done.

    A distribution is a dict {outcome: probability}, or an array, tensor or list `[V]` of 0..V-1.
    Guesses are drawn from q; they and f's distribution then make one sample, which has exactly f's
    distribution (paper, section 2.3 and Discussion; several guesses as in Sequoia, arXiv
    2402.12374).

    g runs on guesses that may be wrong, so it must not do anything that cannot be undone. A g with
    a parameter named `cancelled` is given an Event: once it is set the result will not be used, and
    g may return anything or raise. All calls have ended when this returns or raises. An error of f
    is raised, whatever g does; an error of g only where y was its argument.

    Args:
        f: A slow function of x that returns a distribution.
        g: A slow function of a sample.
        q: A distribution, or a fast function of x that returns one, called in this thread. Any q
            keeps the distribution of y; one close to f's saves time.
        x: The argument of f.
        guesses: How many distinct guesses g is started on; 0 is f and then g, for comparison.
        executor: Where f and g run, threads or processes (f, g, x and their results must then be
            picklable). None is one thread for each, for this call only. A g that itself speculates
            must not use the executor it runs on: with all workers taken it would wait for ever.
        seed: The same seed draws the same numbers, so give every call its own; None draws one.

    Returns:
        The value, the sample, and how it came about.

    Raises:
        InputError: A distribution is invalid, or a function cannot be run so.

    Examples:
        >>> def f(x):
        ...     return {x: 1.0}
        >>> def g(y):
        ...     return y + 1
        >>> speculate(f, g, q={3: 1.0}, x=3).value
        4
    """
    start = perf_counter()
    _require_functions(f, g)
    for name, function in (("f", f), ("g", g), ("q", q)):
        if _gives_coroutines(function):
            raise InputError(f"{name} {COROUTINE}")
    bet = Bet(
        finite_distribution("q", _timed(q, x, {})[0] if callable(q) else q) if guesses else EMPTY,
        guesses,
        seed,
    )
    drawn = perf_counter()
    with _Workers(executor, len(bet.guesses) + 1, {"f": f, "g": g, "x": x}) as workers:
        slow = workers.start(f, x)
        early = [workers.start(g, guess) for guess in bet.guesses]
        distribution, f_seconds = slow.future.result()
        winner, y, beta = bet.settle(finite_distribution("f", distribution))
        for i, run in enumerate(early):
            if i != winner:
                run.cancel()
        right = workers.start(g, y) if winner is None else early[winner]
        value, g_seconds = right.future.result()
    seconds = Seconds(drawn - start, f_seconds, g_seconds, perf_counter() - start)
    return Execution(value, y, winner, bet.guesses, beta, bet.seed, seconds)


async def speculate_async(
    f: Callable[[Any], Awaitable[Any]],
    g: Callable[[Any], Awaitable[Any]],
    q: Any,
    x: Any,
    *,
    guesses: int = 1,
    seed: int | None = 0,
) -> Execution:
    """Do as `speculate` for coroutine functions f and g, as tasks of the running loop.

    The g of a wrong guess is cancelled as tasks are: CancelledError is raised where it awaits. All
    are cancelled if this call is.

    Args:
        f: As `speculate` takes it, a coroutine function.
        g: As `speculate` takes it, a coroutine function.
        q: As `speculate` takes it; it may be a coroutine function.
        x: The argument of f.
        guesses: As `speculate` takes it.
        seed: As `speculate` takes it.

    Returns:
        The value, the sample, and how it came about.

    Raises:
        InputError: A distribution is invalid, or a function cannot be run so.

    Examples:
        >>> async def f(x):
        ...     return {x: 1.0}
        >>> async def g(y):
        ...     return y + 1
        >>> asyncio.run(speculate_async(f, g, q={3: 1.0}, x=3)).value
        4
    """
    began = perf_counter()
    _require_functions(f, g)
    for name, function in (("f", f), ("g", g)):
        flag = _cancelled(function)
        if flag and flag.default is flag.empty:
            raise InputError(f"{name} wants `cancelled`; leave it out: asyncio cancels tasks")
    drafted = q(x) if guesses and callable(q) else q
    distribution = await drafted if inspect.isawaitable(drafted) else drafted
    bet = Bet(finite_distribution("q", distribution) if guesses else EMPTY, guesses, seed)
    drawn = perf_counter()
    tasks: list[asyncio.Task[tuple[Any, float]]] = []

    def start(name: str, function: Callable[[Any], Awaitable[Any]], argument: Any) -> Any:
        tasks.append(asyncio.create_task(_awaited(name, function, argument)))
        return tasks[-1]

    try:
        slow = start("f", f, x)
        early = [start("g", g, guess) for guess in bet.guesses]
        distribution, f_seconds = await slow
        winner, y, beta = bet.settle(finite_distribution("f", distribution))
        for i, run in enumerate(early):
            if i != winner:
                run.cancel()
        value, g_seconds = await (start("g", g, y) if winner is None else early[winner])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    seconds = Seconds(drawn - began, f_seconds, g_seconds, perf_counter() - began)
    return Execution(value, y, winner, bet.guesses, beta, bet.seed, seconds)


class Bet:
    """Distinct guesses drawn from q, and later the sample that they and p make.

    Guesses, their acceptance and the residual have streams of their own. Where q has fewer outcomes
    than `guesses`, all of them are guessed.

    Args:
        q: The distribution of the guesses.
        guesses: How many.
        seed: The seed of the draws; None draws one.

    Raises:
        InputError: `guesses` is no whole number from 0.

    Examples:
        >>> import numpy
        >>> bet = Bet(Distribution(("a", "b"), numpy.array([1.0, 0.0])), guesses=2, seed=0)
        >>> bet.guesses
        ('a',)
    """

    def __init__(self, q: Distribution, guesses: int, seed: int | None) -> None:
        if not whole(guesses) or guesses < 0:
            raise InputError(f"guesses is {guesses!r:.60}; give a whole number, 0 or more")
        self.q, self.seed = q, secrets.randbits(63) if seed is None else as_seed(seed)
        self._drawn: list[int] = []
        rest = q.masses
        while len(self._drawn) < guesses and rest.any():
            self._drawn.append(finite.pick(rest, self._number(len(self._drawn), Purpose.DRAFT)))
            rest = finite.without(rest, self._drawn[-1])
        self.guesses = tuple(q.outcomes[i] for i in self._drawn)

    def settle(self, p: Distribution) -> tuple[int | None, Hashable, float]:
        """Draw the sample.

        Args:
            p: The distribution that the sample has.

        Returns:
            The number of the guess that is the sample, None where none is; the sample; the
            probability that a guess was it.
        """
        outcomes, q_masses, p_masses = finite.together(self.q, p)
        distribution = finite.sample_distribution(p_masses, q_masses, self._drawn)
        index = finite.pick(distribution.kept, self._number(0, Purpose.ACCEPT))
        if index < len(self.guesses):
            return index, self.guesses[index], distribution.beta
        y = finite.pick(distribution.residual, self._number(0, Purpose.NEXT))
        return None, outcomes[y], distribution.beta

    def _number(self, offset: int, purpose: Purpose) -> float:
        return uniform(RowKey(self.seed, 0), 0, offset, purpose)


class _Run(NamedTuple):
    """A call under way, and the Event that tells it that its result will not be used."""

    future: Future[tuple[Any, float]]
    cancelled: Any  # an Event or a Flag

    def cancel(self) -> None:
        self.cancelled.set()
        self.future.cancel()


class _Workers:
    """Runs calls side by side. On exit all are cancelled, and it waits for their end."""

    def __init__(self, executor: Executor | None, threads: int, sent: dict[str, Any]) -> None:
        if not isinstance(executor, Executor | None):
            raise InputError(
                f"executor is {executor!r:.60}; give one of concurrent.futures, or None"
            )
        self._own = executor is None
        self._pool = executor or ThreadPoolExecutor(threads, "foretoken-execute")
        self._runs: list[_Run] = []
        self._folder: TemporaryDirectory[str] | None = None
        if not isinstance(self._pool, ThreadPoolExecutor):
            _require_picklable(sent)
            self._folder = TemporaryDirectory(prefix="foretoken-")

    def __enter__(self) -> _Workers:
        return self

    def start(self, function: Callable[..., Any], argument: Any) -> _Run:
        folder = self._folder
        cancelled = Flag(f"{folder.name}/{len(self._runs)}") if folder else Event()
        keywords = {"cancelled": cancelled} if _cancelled(function) else {}
        run = _Run(self._pool.submit(_timed, function, argument, keywords), cancelled)
        self._runs.append(run)
        return run

    def __exit__(self, *error: object) -> None:
        for run in self._runs:
            run.cancel()
        wait(run.future for run in self._runs)
        if self._own:
            self._pool.shutdown()
        if self._folder:
            self._folder.cleanup()


def _timed(
    function: Callable[..., Any], argument: Any, keywords: dict[str, Any]
) -> tuple[Any, float]:
    start = perf_counter()
    value = function(argument, **keywords)
    if inspect.iscoroutine(value):  # of a function that does not look like one
        value.close()
        raise InputError(f"{value.__qualname__} {COROUTINE}")
    return value, perf_counter() - start


async def _awaited(
    name: str, function: Callable[[Any], Awaitable[Any]], argument: Any
) -> tuple[Any, float]:
    start = perf_counter()
    value = function(argument)
    if not inspect.isawaitable(value):
        raise InputError(f"{name} gives {value!r:.60}, nothing to await; use speculate instead")
    return await value, perf_counter() - start


def _require_functions(f: object, g: object) -> None:
    for name, function in (("f", f), ("g", g)):
        if not callable(function):
            raise InputError(f"{name} is {shown(function)}; give a function")
        flag = _cancelled(function)
        if flag and flag.kind is flag.POSITIONAL_ONLY:
            raise InputError(f"{name} takes `cancelled` by position; let it be given by name")


def _gives_coroutines(function: Any) -> bool:
    calls = (function, type(function).__call__) if callable(function) else ()
    return any(inspect.iscoroutinefunction(call) for call in calls)


def _cancelled(function: Callable[..., Any]) -> inspect.Parameter | None:
    """The parameter of that name, if the function has it."""
    try:
        return inspect.signature(function).parameters.get("cancelled")
    except (TypeError, ValueError):  # some builtins have no signature
        return None


def _require_picklable(sent: dict[str, Any]) -> None:
    for name, value in sent.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            raise InputError(
                f"{name} cannot be sent to another process ({one_line(error)}); "
                "define it at the top level of a module, or use threads"
            ) from error
