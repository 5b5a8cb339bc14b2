"""Stochastic speculative execution, outside language models (paper, Discussion).

A slow f gives a distribution, a slow g takes a sample of it. g is started on guesses, drawn from a
fast approximation q of f, while f still runs; guesses and f's distribution then make one sample
(`sample_distribution`), which has exactly f's distribution. Decoding is the case in which g is the
next f. Knows no models and no tokens.

Examples:
    >>> from reproduction.execute import speculate
    >>> def f(x):
    ...     return {x: 1.0}
    >>> def g(y):
    ...     return y + 1
    >>> speculate(f, g, q={3: 1.0}, x=3).value
    4
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import pickle
import secrets
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from threading import Event
from time import perf_counter, sleep
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretoken.errors import InputError, format_value, to_one_line
from foretoken.sampling.checks import SEED, Count
from foretoken.sampling.keys import Purpose, SequenceKey, draw_uniform

__all__ = ["Execution", "Flag", "Seconds", "speculate", "speculate_async"]

Masses = NDArray[np.float64]


class Seconds(NamedTuple):
    """Times of a call of `speculate`.

    Side by side on too few cores each takes longer; `guesses=0` times f and g alone.

    Attributes:
        q: Seconds of q.
        f: Seconds of f.
        g: Seconds of the g whose value is returned.
        total: Seconds of the whole call.

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
    a parameter named `cancelled` is given an Event, or a `Flag` outside threads: once it is set the
    result will not be used, and g may return anything or raise. All calls have ended when this
    returns or raises. An error of f is raised, whatever g does; an error of g only where y was its
    argument.

    Args:
        f: A slow function of x that returns a distribution.
        g: A slow function of a sample.
        q: A distribution, or a fast function of x that returns one, called in this thread. Any q
            keeps the distribution of y; one close to f's saves time.
        x: The argument of f.
        guesses: How many distinct guesses g is started on; 0 is f and then g, for comparison.
        executor: Where f and g run, such as processes, to which f, g, x and results must be sent;
            None is a thread for each call. A g that itself speculates must not use the executor
            that it runs on: with all workers taken it would wait for ever.
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
    _require_functions(f, g, q, told=("f", "g"))
    drafted = _timed(q, x)[0] if guesses and callable(q) else q
    bet = Bet(finite_distribution("q", drafted) if guesses else EMPTY, guesses, seed)
    drawn = perf_counter()
    with _calls(executor, len(bet.guesses) + 1, {"f": f, "g": g, "x": x}) as begun:
        slow = begun(f, x)
        early = [begun(g, guess) for guess in bet.guesses]
        distribution, f_seconds = slow.future.result()
        winner, y, beta = bet.settle(finite_distribution("f", distribution))
        for i, call in enumerate(early):
            if i != winner:
                call.cancel()
        right = begun(g, y) if winner is None else early[winner]
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
    _require_functions(f, g, q, told=())
    drafted = q(x) if guesses and callable(q) else q
    distribution = await drafted if inspect.isawaitable(drafted) else drafted
    bet = Bet(finite_distribution("q", distribution) if guesses else EMPTY, guesses, seed)
    drawn = perf_counter()
    tasks: list[asyncio.Task[tuple[Any, float]]] = []

    def begun(name: str, function: Callable[[Any], Awaitable[Any]], argument: Any) -> Any:
        tasks.append(asyncio.create_task(_awaited(name, function, argument)))
        return tasks[-1]

    try:
        slow = begun("f", f, x)
        early = [begun("g", g, guess) for guess in bet.guesses]
        distribution, f_seconds = await slow
        winner, y, beta = bet.settle(finite_distribution("f", distribution))
        for i, task in enumerate(early):
            if i != winner:
                task.cancel()
        value, g_seconds = await (begun("g", g, y) if winner is None else early[winner])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    seconds = Seconds(drawn - began, f_seconds, g_seconds, perf_counter() - began)
    return Execution(value, y, winner, bet.guesses, beta, bet.seed, seconds)


class Flag:
    """An Event that processes share: it is set, for all of them, once its file exists.

    Args:
        path: The file.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     flag, same = Flag(f"{folder}/flag"), Flag(f"{folder}/flag")
        ...     before = flag.is_set()
        ...     same.set()
        ...     before, flag.is_set(), flag.wait()
        (False, True, True)
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def set(self) -> None:
        """Set it."""
        with open(self._path, "w"):
            pass

    def is_set(self) -> bool:
        """Tell whether it is set.

        Returns:
            True once any process has set it.
        """
        return os.path.exists(self._path)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set.

        Args:
            timeout: Seconds to wait at most; None for no limit.

        Returns:
            True once it is set, False where the time has passed before.
        """
        end = None if timeout is None else perf_counter() + timeout
        while not self.is_set() and (end is None or perf_counter() < end):
            sleep(0.002)
        return self.is_set()


class _Call(NamedTuple):
    """A call under way, and the Event that tells it that its result is not used."""

    future: Future[tuple[Any, float]]
    cancelled: Event | Flag

    def cancel(self) -> None:
        self.cancelled.set()
        self.future.cancel()


@contextmanager
def _calls(
    executor: Executor | None, threads: int, sent: dict[str, Any]
) -> Iterator[Callable[[Callable[..., Any], Any], _Call]]:
    """Give what begins a call of a function. On exit all calls are cancelled, and have ended."""
    if not isinstance(executor, Executor | None):
        raise InputError(
            f"executor is {format_value(executor)}; give one of concurrent.futures, or None"
        )
    calls: list[_Call] = []
    with ExitStack() as stack:
        pool, folder = executor, None
        if pool is None:
            pool = stack.enter_context(ThreadPoolExecutor(threads, "foretoken-execute"))
        if not isinstance(pool, ThreadPoolExecutor):
            _require_picklable(sent)
            folder = stack.enter_context(TemporaryDirectory(prefix="foretoken-"))

        def begun(function: Callable[..., Any], argument: Any) -> _Call:
            cancelled = Event() if folder is None else Flag(f"{folder}/{len(calls)}")
            keywords = {"cancelled": cancelled} if _cancelled(function) else {}
            calls.append(_Call(pool.submit(_timed, function, argument, **keywords), cancelled))
            return calls[-1]

        try:
            yield begun
        finally:
            for call in calls:
                call.cancel()
            # one that never began does not end either, where the workers have died
            wait([call.future for call in calls if not call.future.cancelled()])


def _require_picklable(sent: dict[str, Any]) -> None:
    for name, value in sent.items():
        try:
            pickle.dumps(value)
        except Exception as error:  # anybody's code
            raise InputError(
                f"{name} cannot be sent to another process ({to_one_line(error)}); "
                "define it at the top level of a module, or use threads"
            ) from error


def _timed(function: Callable[..., Any], argument: Any, **keywords: Any) -> tuple[Any, float]:
    start = perf_counter()
    value = function(argument, **keywords)
    if inspect.iscoroutine(value):
        value.close()
        raise InputError(
            f"{value.__qualname__} is a coroutine function; await speculate_async(...) instead"
        )
    return value, perf_counter() - start


async def _awaited(
    name: str, function: Callable[[Any], Awaitable[Any]], argument: Any
) -> tuple[Any, float]:
    start = perf_counter()
    value = function(argument)
    if not inspect.isawaitable(value):
        raise InputError(f"{name} gives {value!r:.60}, nothing to await; use speculate instead")
    return await value, perf_counter() - start


def _require_functions(f: object, g: object, q: object, told: Sequence[str]) -> None:
    """Raise InputError where one cannot be called; `told`: those that are given `cancelled`."""
    for name, function in (("f", f), ("g", g), ("q", q)):
        if name != "q" and not callable(function):
            raise InputError(f"{name} is {format_value(function)}; give a function")
        flag = _cancelled(function)
        if flag is None:
            continue
        if flag.kind is flag.POSITIONAL_ONLY:
            raise InputError(f"{name} takes `cancelled` by position; let it be given by name")
        if flag.default is flag.empty and name not in told:
            reason = "q is never cancelled" if told else "asyncio cancels tasks"
            raise InputError(f"{name} wants `cancelled`; leave it out: {reason}")


def _cancelled(function: Any) -> inspect.Parameter | None:
    """The parameter of that name, if it is a function that has it."""
    try:
        return inspect.signature(function).parameters.get("cancelled")
    except (TypeError, ValueError):  # no function, or a builtin without a signature
        return None


class Distribution(NamedTuple):
    """A distribution over a finite set: the outcomes, and their probabilities `[V]`, sum 1."""

    outcomes: Sequence[Hashable]
    masses: Masses


EMPTY = Distribution((), np.zeros(0))  # in place of q where no guesses are drawn


class Bet:
    """Distinct guesses drawn from q, and later the sample that they and p make.

    Guesses, their acceptance and the residual have streams of their own. Where q has fewer outcomes
    than `guesses`, all of them are guessed. seed None draws one.
    """

    def __init__(self, q: Distribution, guesses: int, seed: int | None) -> None:
        guesses = Count(ge=0, remedy="a whole number, 0 or more")("guesses", guesses)
        self.q, self.seed = q, secrets.randbits(63) if seed is None else SEED("seed", seed)
        self._drawn: list[int] = []
        rest = q.masses
        while len(self._drawn) < guesses and rest.any():
            self._drawn.append(pick(rest, self._number(len(self._drawn), Purpose.DRAFT)))
            rest = without(rest, self._drawn[-1])
        self.guesses = tuple(q.outcomes[i] for i in self._drawn)

    def settle(self, p: Distribution) -> tuple[int | None, Hashable, float]:
        """Draw the sample, which has the distribution p: the number of the guess that it is, None
        where it is none; the sample; the probability that a guess was it."""
        outcomes, q_masses, p_masses = together(self.q, p)
        distribution = sample_distribution(p_masses, q_masses, self._drawn)
        index = pick(distribution.kept, self._number(0, Purpose.ACCEPT))
        if index < len(self.guesses):
            return index, self.guesses[index], distribution.beta
        y = pick(distribution.residual, self._number(0, Purpose.NEXT))
        return None, outcomes[y], distribution.beta

    def _number(self, offset: int, purpose: Purpose) -> float:
        return draw_uniform(SequenceKey(self.seed, 0), 0, offset, purpose)


class SampleDistribution(NamedTuple):
    """The distribution of the sample, given the guesses: one of them, or else a draw from
    `residual`."""

    kept: Masses  # [k+1]: the probability that guess i is the sample; the last entry: none is
    residual: Masses  # [V]: the distribution of the sample if no guess is
    beta: float  # the probability that one is kept, the mean over the last guess


def finite_distribution(owner: str, value: Any) -> Distribution:
    """The distribution in a dict {outcome: probability}, or in an array, tensor or list `[V]` of
    the outcomes 0..V-1, scaled to sum to 1 in float64. InputError names what is wrong in it."""
    if isinstance(value, Mapping):
        outcomes, masses = list(value), _masses(owner, list(value.values()))
    else:
        masses = _masses(owner, value)
        outcomes = range(masses.size)
    for outcome, mass in zip(outcomes, masses.tolist(), strict=True):
        if not 0 <= mass < math.inf:
            raise InputError(
                f"{owner} gives {format_value(outcome)} a probability of {mass}; give numbers, "
                "0 or more"
            )
    total = masses.sum()
    if not abs(total - 1) < 1e-4:  # float32 rounds every term
        raise InputError(f"the probabilities that {owner} gives sum to {total:g}; they must to 1")
    return Distribution(outcomes, masses / total)


def _masses(owner: str, values: Any) -> Masses:
    """The numbers `[V]` of a distribution, not yet checked to be one."""
    try:
        if hasattr(values, "detach"):  # a tensor, on any device: torch itself is not imported
            values = values.detach().cpu()
            values = values.double() if values.is_floating_point() else values.tolist()
        masses = np.asarray(values)
        real = masses.dtype.kind in "biufO"  # no texts, dates or complex numbers
        masses = masses.astype(np.float64) if real else np.zeros(())
    except (TypeError, ValueError):
        masses = np.zeros(())
    if masses.ndim != 1:
        raise InputError(
            f"{owner} gives {' '.join(repr(values).split()):.60}; "
            "give a distribution: a dict of probabilities, or an array (V,)"
        )
    return masses


def together(q: Distribution, p: Distribution) -> tuple[Sequence[Hashable], Masses, Masses]:
    """The outcomes of both, q's first and in q's order, with q and p over them."""
    if q.outcomes == p.outcomes:
        return q.outcomes, q.masses, p.masses
    outcomes = list(dict.fromkeys([*q.outcomes, *p.outcomes]))
    wide: list[Masses] = []
    for distribution in (q, p):
        masses = dict(zip(distribution.outcomes, distribution.masses.tolist(), strict=True))
        wide.append(np.array([masses.get(outcome, 0.0) for outcome in outcomes]))
    return outcomes, wide[0], wide[1]


def sample_distribution(p: Masses, q: Masses, guesses: Sequence[int]) -> SampleDistribution:
    """The paper's rule for one position (section 2.3), with recursive rejection without replacement
    for more than one guess (Sequoia, arXiv 2402.12374): the distribution of the sample, given
    distinct guesses drawn one after the other from q without replacement.

    p, q: distributions `[V]`. Guess x is kept with probability min(1, p(x)/q(x)); else p becomes
    norm((p - q)+), q loses x, and the next guess is judged likewise. Over all guesses the sample
    has the distribution p, whatever q is. The residual gives rejected guesses no probability.
    """
    masses, rest, beta = [], 1.0, 0.0
    for x in guesses:
        beta = 1 - rest * (1 - float(np.minimum(p, q).sum()))
        accept = min(1.0, float(p[x] / q[x]))
        masses.append(rest * accept)
        rest *= 1 - accept
        if rest > 0:
            p, q = normalized(np.maximum(p - q, 0.0), otherwise=p), without(q, x)
    return SampleDistribution(np.array([*masses, rest]), p, min(1.0, beta))


def without(q: Masses, x: int) -> Masses:
    """q given that the outcome is not x; all zeros where no other is possible."""
    rest = q.copy()
    rest[x] = 0.0
    return normalized(rest, otherwise=rest)


def normalized(masses: Masses, otherwise: Masses) -> Masses:
    total = masses.sum()
    return masses / total if total > 0 else otherwise


def pick(masses: Masses, draw_uniform: float) -> int:
    """Inverse CDF: the index that a number in [0, 1) picks, never one of zero mass."""
    cdf = masses.cumsum()
    level = min(draw_uniform * cdf[-1], np.nextafter(cdf[-1], 0.0))
    return int(np.searchsorted(cdf, level, side="right"))
