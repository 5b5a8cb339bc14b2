"""The public engine: requests in at any time, events out with every step.

It runs on the Speculator's own `EngineCore`, so `spec.generate` and `spec.stream` may be called
meanwhile, and their sequences share the steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Unpack, cast

from foretoken.engine.core import EngineCore
from foretoken.engine.options import EngineKeywords, EngineOptions
from foretoken.engine.output_stream import OutputStream, make_output_stream
from foretoken.engine.scheduler import SequenceTask
from foretoken.errors import BusyError, InputError, RefusedError, format_value, is_whole_number
from foretoken.inputs import Prompt, Prompts, make_keys, resolve_verifier
from foretoken.records import PartialOutput, StepRecord
from foretoken.request import Completion, FinishReason, Piece
from foretoken.sampling.acceptance_rules import Rule
from foretoken.sampling.logprobs import Logprobs
from foretoken.sampling.params import Controls, SamplingParams
from foretoken.speculator import MAX_BATCH_SIZE, Speculator
from foretoken.text.decoding import TokenText


@dataclass(frozen=True, slots=True)
class Event:
    """New text of a request, of one step.

    Attributes:
        id: The request.
        text: The text that was added; None without a tokenizer.
        tokens: The ids that were added.
        logprobs: The ones of these tokens, where they were asked for.
        finish_reason: None but in the request's last event.
        completion: The result, in the last event: texts and tokens of all events concatenate to it.
        steps: Records of the step, most often one.
        error: The error behind a finish_reason "error".
        pieces: The text that each of these tokens added, and its offset in the request's text, in
            characters; [] without a tokenizer.

    Examples:
        >>> import foretoken
        >>> with foretoken.Engine(foretoken.load("novels", draft="none")) as engine:
        ...     id = engine.add("The captain looked", max_new_tokens=1, gamma=0)
        ...     (event,) = engine.step()
        >>> event.id == id, event.text, event.finish_reason
        (True, ' at', 'length')
    """

    id: int
    text: str | None
    tokens: list[int]
    logprobs: list[Logprobs] | None = None
    finish_reason: FinishReason | None = None
    completion: Completion | None = None
    steps: list[StepRecord] = field(default_factory=list[StepRecord])
    error: RefusedError | None = None
    pieces: list[TokenText] = field(default_factory=list[TokenText])


@dataclass(slots=True)
class EngineStats:
    """Counters of an engine.

    Attributes:
        running: Requests that have begun, and whose last event is still to come.
        waiting: Requests that have not begun.
        finished: Requests that have ended, those with an error included.
        aborted: Requests that were dropped.
        preempted: Times that a sequence had to wait again, as memory ran short.
        steps: Steps taken.
        tokens: New tokens of its requests.

    Examples:
        >>> import foretoken
        >>> with foretoken.Engine(foretoken.load("novels")) as engine:
        ...     id = engine.add("The captain looked", max_new_tokens=4, gamma=3)
        ...     engine.stats().waiting
        1
    """

    running: int = 0
    waiting: int = 0
    finished: int = 0
    aborted: int = 0
    preempted: int = 0
    steps: int = 0
    tokens: int = 0


class Engine:
    """Continuous batching through one Speculator: requests join and leave at any step.

    At most `max_rows` requests run at a time, first come, first served. A request's distribution is
    what it is alone, whatever the others; its text too where arithmetic does not depend on the
    batch (docs/exactness.md). `add` and `abort` may be called by any thread.

    Args:
        spec: The Speculator, which can have one engine at a time.
        max_rows: Requests that run at a time.
        max_length: Tokens of a text at most, its prompt included; None is what the model can hold.
        kv_memory: Bytes for keys and values of target and draft together. Requests that it is too
            small for wait, and the youngest waits again where texts outgrow it. None is what
            max_rows need, and up to 1 GB for prefix_cache.
        max_waiting: Requests that may wait.
        prefix_cache: True keeps what was read of texts, where the backend can (the native decoder),
            for others that begin alike, and outputs for look-up to copy from (docs/serving.md).
        rule: The acceptance method of requests that name none.
        lenience: The lenience of requests that name none.

    Raises:
        InputError: An option is invalid, or the models have an engine already.

    Examples:
        >>> import foretoken
        >>> texts = {}
        >>> with foretoken.Engine(foretoken.load("novels")) as engine:
        ...     for prompt in ("The captain looked", "It was a cold"):
        ...         texts[engine.add(prompt, max_new_tokens=8, gamma=3)] = ""
        ...     while engine.running or engine.waiting:
        ...         for event in engine.step():
        ...             texts[event.id] += event.text
        >>> texts[0]
        ' at the doctor, and the doctor said'
    """

    def __init__(
        self, spec: Speculator, max_rows: int = 16, **options: Unpack[EngineKeywords]
    ) -> None:
        if not isinstance(spec, Speculator):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(
                f"spec is {format_value(spec)}; give a Speculator, as foretoken.load makes"
            )
        own = self._options = EngineOptions(max_rows, **options)
        context, length = spec.target.context, own.max_length
        if length is not None and context is not None and length > context:
            raise InputError(
                f"max_length is {length}, the target's context {context}; give at most that"
            )
        self._spec, self._inputs = spec, replace(spec.inputs, max_length=length)
        self._core: EngineCore = spec.core
        self._core.configure(own.max_rows, own.kv_memory, cache_prefixes=own.prefix_cache)
        self._streams: dict[int, OutputStream] = {}
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
        begun: PartialOutput | None = None,
        id: int | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **controls: Unpack[Controls],
    ) -> int:
        """Add a request. Other arguments are those of `Speculator.generate`.

        Args:
            prompt: One prompt.
            seed: An int, or the pair of an earlier completion.
            rule: None is the engine's. A request with another one than those that run waits until
                these are done.
            lenience: The same.
            cache_salt: The request's prefix serves requests of the same salt only.
            priority: Requests of a greater one are admitted first, and others leave before them
                where memory runs short.
            prediction: The expected text, or its ids, drafted before the drafter is asked; it does
                not change the distribution.
            begun: Tokens that another engine has written for the same request; the text continues
                as it would have there, and events tell of what is new.
            id: The request's, which no other may have that runs or waits; None: a new one.

        Returns:
            The request's id.

        Raises:
            InputError: The request is invalid, asks for several texts, or can never fit.
            BusyError: `max_waiting` requests wait already.
            RefusedError: The request asks for what cannot be followed exactly.
        """
        self._require_open()
        if len(self._streams) >= self.max_rows + self._options.max_waiting:
            raise BusyError(
                f"{self._options.max_waiting} requests wait already; take steps first, or give a "
                "larger max_waiting"
            )
        verifier = resolve_verifier(
            gamma,
            self._options.rule if rule is None else rule,
            self._options.lenience if lenience is None else lenience,
        )
        inputs, template = self._inputs, (chat_template, chat_template_kwargs)
        requests = inputs.assemble("add", prompt, params, controls, 0, *template)
        if len(requests) != 1:
            problem = f"a request has one text of one prompt, not {len(requests)}"
            raise InputError(f"{problem}; add each by itself, with a seed of its own")
        (key,) = make_keys([seed], [1])
        if id is not None and (not is_whole_number(id) or id in self._streams):
            raise InputError(
                f"id is {format_value(id)}; give a whole number that no other request has"
            )
        if not isinstance(cache_salt, str | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(f"cache_salt is {format_value(cache_salt)}; give a str")
        if begun is not None:
            _require_begun(begun, self._spec.target.vocab_size)
        if not is_whole_number(priority):
            raise InputError(f"priority is {format_value(priority)}; give a whole number")
        expected = () if prediction is None else inputs.tokenize_prediction(prediction)
        own = {"key": key, "salt": cache_salt or "", "prediction": expected}
        requests = [replace(requests[0], **own)]
        (seq,) = inputs.make_sequences(requests)
        policy = self._spec.costing.make_policy(requests, gamma, self.max_rows)
        output = make_output_stream(seq, self._spec.tokenizer)
        if begun is not None:
            output.resume(begun)
            if seq.finish_reason is not None:
                raise InputError("begun ends the text already; add the request without it")
        self._core.add([SequenceTask(seq, verifier, policy, int(priority))])
        if id is None:
            id = next(number for number in self._ids if number not in self._streams)
        self._streams[id] = output
        if self._closed:  # meanwhile, by another thread
            self._streams.pop(id, None)
            self._core.abort([seq])
            self._require_open()
        return id

    def step(self) -> list[Event]:
        """Advance all running requests by a step.

        Returns:
            Its events, request by request; [] where nothing runs or waits. A request that fails
            says so in its event, and the others go on.

        Raises:
            InputError: The engine is closed.
        """
        self._require_open()
        self._core.refuse_reentry()
        try:
            self._stats.steps += self._core.step()
        except RefusedError as error:  # nobody knows of which row
            self._core.fail(error)
        with self._core.pause():
            events = [self._make_event(*entry) for entry in list(self._streams.items())]
        return [event for event in events if event is not None]

    def abort(self, id: int) -> None:
        """Drop a request, wherever it is.

        Args:
            id: The request.

        Raises:
            InputError: The request is unknown or finished.
        """
        entry = self._streams.pop(id, None)
        if entry is None:
            raise InputError(
                f"request {format_value(id)} is unknown or finished; give an id that runs"
            )
        self._stats.aborted += 1
        self._core.abort([entry.seq])

    @property
    def max_rows(self) -> int:
        """Requests that run at a time."""
        return self._core.scheduler.max_rows

    @property
    def max_length(self) -> int | None:
        """Tokens of a text at most, its prompt included; None without a limit."""
        limits = [
            n for n in (self._options.max_length, self._spec.target.max_context) if n is not None
        ]
        return min(limits, default=None)

    @property
    def running(self) -> int:
        """Requests that have begun, and whose last event is still to come."""
        return len(self._streams) - self.waiting

    @property
    def waiting(self) -> int:
        """Requests that have not begun."""
        return sum(not entry.seq.start_time for entry in list(self._streams.values()))

    def stats(self) -> EngineStats:
        """Return a copy of the engine's counters.

        Returns:
            The counters.
        """
        preempted = self._core.scheduler.preempted
        return replace(self._stats, running=self.running, waiting=self.waiting, preempted=preempted)

    def close(self) -> None:
        """Drop all requests; the Speculator can have another engine afterwards."""
        self._core.refuse_reentry()
        self._closed = True
        if not self._released:  # broken off, it is gone on with by the next call
            self._core.abort([entry.seq for entry in list(self._streams.values())])
            self._streams.clear()
            self._core.reset(MAX_BATCH_SIZE)
            self._released = True

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise InputError("the engine is closed; make another one")

    def _make_event(self, id: int, entry: OutputStream) -> Event | None:
        seq, piece = entry.seq, entry.take_piece()
        if piece is None and seq.finish_reason is None:
            return None
        piece = piece or Piece(entry.take_text(), [])
        completion = None
        if seq.finish_reason is not None:
            self._streams.pop(id, None)
            completion = self._spec.make_completion(seq)
            self._stats.finished += 1
        self._stats.tokens += len(piece.tokens)
        steps = entry.take_records()
        return Event(
            id,
            piece.text,
            piece.tokens,
            piece.logprobs,
            seq.finish_reason,
            completion,
            steps,
            seq.error,
            entry.pieces,
        )


def _require_begun(begun: object, V: int) -> None:
    """Raise InputError unless it is the beginning of a sequence of V ids."""
    if not isinstance(begun, PartialOutput):
        raise InputError(f"begun is {format_value(begun)}; give a foretoken.records.PartialOutput")
    steps: Any = begun.steps
    if not isinstance(steps, list) or not all(
        isinstance(step, StepRecord) for step in cast(list[Any], steps)
    ):
        problem = f"begun's steps are {format_value(begun.steps)}"
        raise InputError(f"{problem}; give the steps of a completion")
    for token in (token for step in begun.steps for token in step.new_tokens):
        if not is_whole_number(token) or not 0 <= token < V:
            raise InputError(f"begun holds the id {format_value(token)}; ids must be in 0..{V - 1}")
