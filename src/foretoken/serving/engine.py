"""A moving batch with a face: requests in at any time, events out with every step.

What runs is the Speculator's own scheduler, so `spec.generate` and `spec.stream` may be called
meanwhile, and their rows share the steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Unpack

from foretoken.engine.output_stream import OutputStream
from foretoken.engine.scheduler import Scheduler, Task
from foretoken.errors import BusyError, InputError, RefusedError, shown, whole
from foretoken.models.base import longest
from foretoken.options import Prompt, Prompts, check
from foretoken.records import Begun, StepRecord
from foretoken.request import Completion, FinishReason, Piece, Request
from foretoken.sampling.logprobs import Logprobs
from foretoken.sampling.params import Controls, SamplingParams, gathered
from foretoken.sampling.verify import Rule
from foretoken.speculator import Speculator


@dataclass(frozen=True, slots=True)
class Event:
    """What a step added to a request's text. The last one has the completion, which the texts and
    tokens of all concatenate to."""

    id: int
    text: str | None  # None without a tokenizer
    tokens: list[int]
    logprobs: list[Logprobs] | None = None
    finish_reason: FinishReason | None = None
    completion: Completion | None = None
    steps: list[StepRecord] = field(default_factory=list[StepRecord])  # most often one
    error: RefusedError | None = None  # behind a finish_reason "error"


@dataclass(slots=True)
class EngineStats:
    """What an engine has done since it was made, and does."""

    running: int = 0  # requests that have begun
    waiting: int = 0  # and those that have not
    finished: int = 0  # requests, those with an error included
    aborted: int = 0
    preempted: int = 0  # times that a row had to wait again, as memory ran short
    steps: int = 0
    tokens: int = 0  # new ones, of its requests


class Engine:
    """Requests through one Speculator: at most `max_rows` at a time, first come, first served;
    beyond them `max_waiting` may wait. rule, lenience: as `generate` takes them, for requests that
    name none.

    max_length: tokens of a text at most, its prompt included; by itself what the model can hold.
    kv_memory: bytes for keys and values of target and draft together; rows that it is too small for
    wait, and the youngest waits again where texts outgrow it. By itself what max_rows need, and up
    to 1 GB for prefix_cache.

    prefix_cache: keep what was read of texts, where the runtime can (OpenVINO's paged attention),
    for others that begin alike, and what was said, for lookup to copy from (docs/engine.md). In
    float32 and below it may be rounded otherwise than read anew.

    A request's law is what it is alone, whatever its mates; its text too where arithmetic does not
    depend on the batch (docs/exact.md). `add` and `abort` may be called by any thread. Raises
    InputError for models that have an engine already.
    """

    def __init__(
        self,
        spec: Speculator,
        max_rows: int = 16,
        *,
        max_length: int | None = None,
        kv_memory: int | None = None,
        max_waiting: int = 1024,
        prefix_cache: bool = True,
        rule: str | Rule = "block",
        lenience: float = 1.0,
    ) -> None:
        if not isinstance(spec, Speculator):
            raise InputError(f"spec is {shown(spec)}; give a Speculator, as foretoken.load makes")
        numbers = {"max_rows": max_rows, "max_waiting": max_waiting}
        optional = {"max_length": max_length, "kv_memory": kv_memory}
        numbers |= {name: value for name, value in optional.items() if value is not None}
        for name, value in numbers.items():
            if not whole(value) or value < 1:
                raise InputError(f"{name} is {shown(value)}; give a whole number from 1")
        context = spec.target.context
        if max_length is not None and context is not None and max_length > context:
            raise InputError(
                f"max_length is {max_length}, the target's context {context}; give at most that"
            )
        check(None, rule, lenience)
        self._rule, self._lenience = rule, lenience
        self._spec, self._max_waiting, self._max_length = spec, int(max_waiting), max_length
        if not isinstance(prefix_cache, bool):
            raise InputError(f"prefix_cache is {shown(prefix_cache)}; give True or False")
        self._scheduler: Scheduler = spec.engaged(
            int(max_rows), kv_memory, prefix_cache=prefix_cache
        )
        self._entries: dict[int, OutputStream] = {}
        self._ids = count()
        self._stats = EngineStats()
        self._closed = self._released = False

    def add(
        self,
        prompt: Prompts,
        params: SamplingParams | None = None,
        *,
        gamma: int | None = None,
        seed: int | tuple[int, int] = 0,
        rule: str | Rule | None = None,
        lenience: float | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        prediction: Prompt | None = None,
        begun: Begun | None = None,
        id: int | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **controls: Unpack[Controls],
    ) -> int:
        """Take a request on: one prompt, with what `generate` takes; its id. cache_salt: what is
        read of it serves requests of the same salt only. priority: requests of a greater one are
        taken on first, and others leave before them where memory runs short. rule, lenience: a
        request with others than those that run waits until these are done. prediction: what the
        text is expected to be, which is guessed before the drafter is asked; it changes no law.
        begun: what another engine has written for the same request; the text goes on as it would
        have there, and events tell of what is new. id: the request's, which no other may have that
        runs or waits; left out: a new one.

        InputError for what no text can follow from and for what can never fit, BusyError for a full
        queue, RefusedError for several texts of one request.
        """
        self._require_open()
        if len(self._entries) >= self._scheduler.most + self._max_waiting:
            raise BusyError(
                f"{self._max_waiting} requests wait already; take steps first, or give a larger "
                "max_waiting"
            )
        judge = check(
            gamma,
            self._rule if rule is None else rule,
            self._lenience if lenience is None else lenience,
        )
        prompts = self._spec.prompts(prompt, chat_template, chat_template_kwargs)
        if len(prompts) != 1:
            remedy = "add them one by one" if prompts else "give one"
            raise InputError(f"prompt holds {len(prompts)} prompts; {remedy}")
        (wishes,) = gathered(params, controls, 1, "add")
        if wishes.num_return_sequences != 1:
            raise RefusedError(
                f"a request has one text, not num_return_sequences={wishes.num_return_sequences}; "
                "add it several times, with seeds of their own"
            )
        (request,) = self._spec.requests(prompts, [wishes], [seed])
        if id is not None and (not whole(id) or id in self._entries):
            raise InputError(f"id is {shown(id)}; give a whole number that no other request has")
        if not isinstance(cache_salt, str | None):
            raise InputError(f"cache_salt is {shown(cache_salt)}; give a str")
        if not whole(priority):
            raise InputError(f"priority is {shown(priority)}; give a whole number")
        if (limit := self._limit(request)) < request.limit:  # a forced last token moves too
            wishes = replace(wishes, max_new_tokens=limit)
            (request,) = self._spec.requests(prompts, [wishes], [seed])
        expected = () if prediction is None else self._spec.prediction(prediction)
        requests = [replace(request, salt=cache_salt or "", prediction=expected)]
        (row,) = self._spec.rows(requests)
        policy = self._spec.policy(requests, gamma, self._scheduler.most)
        output = self._spec.output_stream(row)
        if begun is not None:
            output.resume(begun)
            if row.finish_reason is not None:
                raise InputError("begun ends the text already; add the request without it")
        self._scheduler.submit([Task(row, judge, policy, int(priority))])
        if id is None:
            id = next(number for number in self._ids if number not in self._entries)
        self._entries[id] = output
        if self._closed:  # meanwhile, by another thread
            self._entries.pop(id, None)
            self._scheduler.abort([row])
            self._require_open()
        return id

    def _limit(self, request: Request) -> int:
        """New tokens of a request, within max_length."""
        prompt, most = len(request.prompt), self._max_length
        if most is not None and prompt >= most:
            raise InputError(
                f"the prompt has {prompt} tokens, max_length={most} leaves room for no new one; "
                "shorten it, or give the engine a greater max_length"
            )
        return request.limit if most is None else min(request.limit, most - prompt)

    def step(self) -> list[Event]:
        """Advance all that run by a step; what it added, request by request. [] where nothing runs
        or waits. A request that fails says so in its event, others go on."""
        self._require_open()
        self._scheduler.refuse_inner()
        try:
            self._stats.steps += self._scheduler.step()
        except RefusedError as error:  # of which row nobody knows
            self._scheduler.fail(error)
        with self._scheduler.still():
            events = [self._event(*entry) for entry in list(self._entries.items())]
        return [event for event in events if event is not None]

    def abort(self, id: int) -> None:
        """Drop a request, wherever it is. InputError for one that is unknown or finished."""
        entry = self._entries.pop(id, None)
        if entry is None:
            raise InputError(f"request {shown(id)} is unknown or finished; give an id that runs")
        self._scheduler.abort([entry.row])
        self._stats.aborted += 1

    @property
    def max_rows(self) -> int:
        """Requests that run at a time."""
        return self._scheduler.most

    @property
    def longest(self) -> int | None:
        """Tokens of a text at most, its prompt included; None without a limit."""
        limits = [n for n in (self._max_length, longest(self._spec.target)) if n is not None]
        return min(limits, default=None)

    @property
    def running(self) -> int:
        """Requests that have begun, and whose last event is still to come."""
        return len(self._entries) - self.waiting

    @property
    def waiting(self) -> int:
        """Requests that have not begun."""
        return sum(not entry.row.began for entry in list(self._entries.values()))

    def stats(self) -> EngineStats:
        """A copy."""
        preempted = self._scheduler.preempted
        return replace(self._stats, running=self.running, waiting=self.waiting, preempted=preempted)

    def close(self) -> None:
        """Drop all requests; the Speculator may have another engine then."""
        self._scheduler.refuse_inner()
        self._closed = True
        if not self._released:  # broken off, it is gone on with by the next call
            self._scheduler.abort([entry.row for entry in list(self._entries.values())])
            self._entries.clear()
            self._spec.released()
            self._released = True

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise InputError("the engine is closed; make another one")

    def _event(self, id: int, entry: OutputStream) -> Event | None:
        row, piece = entry.row, entry.piece()
        if piece is None and row.finish_reason is None:
            return None
        piece = piece or Piece(entry.text(), [])
        completion = None
        if row.finish_reason is not None:
            self._entries.pop(id, None)
            completion = self._spec.completion(row)
            self._stats.finished += 1
        self._stats.tokens += len(piece.tokens)
        steps = entry.records()
        return Event(
            id,
            piece.text,
            piece.tokens,
            piece.logprobs,
            row.finish_reason,
            completion,
            steps,
            row.error,
        )
