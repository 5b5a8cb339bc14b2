"""The public engine: takes requests at any time and returns events at every step.

The engine uses the Speculator's `EngineCore`: its requests share steps with the sequences of
`spec.generate` and `spec.stream`, which other threads may call at the same time.
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
    """New output of a request.

    Attributes:
        id: The request's id.
        text: The new characters; None without a tokenizer.
        tokens: The new token ids.
        logprobs: The logprobs of these tokens; None if the request does not ask for them.
        finish_reason: None except in the request's last event.
        completion: The result; None except in the request's last event. Its `text` is
            the joined `text` of all events; its `tokens` are the joined `tokens` of all events.
        steps: The records of the steps since the previous event, usually of one step.
        error: The error, if finish_reason is "error".
        pieces: For each of these tokens, the characters that the token added to the output, and
            the offset of these characters in the output; [] without a tokenizer.

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
        running: Requests that have started and whose last event is still to come.
        waiting: Requests that have not started.
        finished: Requests that have finished, including those with an error.
        aborted: Requests that were aborted.
        preempted: Number of times that a sequence was preempted for lack of KV cache memory.
        steps: Steps taken.
        tokens: Output tokens of all requests.

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

    At most `max_rows` requests run at a time, first come, first served. The distribution of a
    request's output does not depend on the other requests. If the backend's arithmetic does not
    depend on the batch, the output itself does not depend on them either (docs/exactness.md). Any
    thread may call `add` and `abort`.

    Args:
        spec: The Speculator, which can have one engine at a time.
        max_rows: Maximum number of requests that run at a time.
        max_length: Maximum tokens of a sequence, prompt included. None: the context length.
        kv_memory: Bytes for the KV caches of target and draft model together. Requests that do not
            fit wait. If the running sequences outgrow this memory, the youngest sequence is
            preempted. None: as much as `max_rows` sequences need, and up to 1 GB for the prefix
            cache.
        max_waiting: Maximum number of waiting requests.
        prefix_cache: True caches the keys and values of sequences for later sequences with the same
            prefix, if the backend supports it (native does), and caches outputs for the look-up
            drafter (docs/serving.md).
        rule: The default acceptance method of requests.
        lenience: The default lenience of requests.

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
                f"spec is {format_value(spec)}; give a Speculator, which foretoken.load returns"
            )
        checked = self._options = EngineOptions(max_rows, **options)
        context, length = spec.target.context, checked.max_length
        if length is not None and context is not None and length > context:
            raise InputError(
                f"max_length is {length}, but the target's context length is {context}; give a "
                f"max_length of at most {context}"
            )
        self._spec, self._inputs = spec, replace(spec.inputs, max_length=length)
        self._core: EngineCore = spec.core
        self._core.configure(
            checked.max_rows, checked.kv_memory, cache_prefixes=checked.prefix_cache
        )
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
            seed: An int, or the attribute `seed` of an earlier completion.
            rule: The acceptance method; None: the engine's. A request whose rule or lenience
                differs from that of the running requests waits until they finish.
            lenience: The lenience; None: the engine's.
            cache_salt: Only requests with the same salt share cached prefixes.
            priority: Requests of a higher priority are admitted first and preempted last.
            prediction: The expected output, as text or ids. Its tokens are proposed in place of
                the drafter's draft tokens; the output's distribution does not change.
            begun: Output that another engine has generated for the same request. The request
                continues as it would have in that engine. Its events contain only new tokens.
            id: An id that no running or waiting request has; None: a new one.

        Returns:
            The request's id.

        Raises:
            InputError: The request is invalid, asks for several outputs, or can never fit into
                memory.
            BusyError: `max_waiting` requests wait already.
            RefusedError: An option cannot be followed exactly.

        Examples:
            >>> import foretoken
            >>> with foretoken.Engine(foretoken.load("novels")) as engine:
            ...     engine.add("The captain looked", max_new_tokens=8, gamma=3)
            0
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
            problem = f"a request has one prompt and one output, not {len(requests)}"
            raise InputError(f"{problem}; add one request for each output, with different seeds")
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
        requests = [replace(requests[0], key=key, salt=cache_salt or "", prediction=expected)]
        (seq,) = inputs.make_sequences(requests)
        policy = self._spec.costing.make_policy(requests, gamma, self.max_rows)
        output = make_output_stream(seq, self._spec.tokenizer)
        if begun is not None:
            output.resume(begun)
            if seq.finish_reason is not None:
                raise InputError("begun is a finished output; add the request without begun")
        self._core.add([SequenceTask(seq, verifier, policy, int(priority))])
        if id is None:
            id = next(number for number in self._ids if number not in self._streams)
        self._streams[id] = output
        if self._closed:  # by another thread, during this call
            self._streams.pop(id, None)
            self._core.abort([seq])
            self._require_open()
        return id

    def step(self) -> list[Event]:
        """Advance all running requests by a step.

        Returns:
            The events, at most one per request; [] if no request runs or waits. If a
            request fails, its event has an `error`; the other requests continue.

        Raises:
            InputError: The engine is closed.

        Examples:
            >>> import foretoken
            >>> with foretoken.Engine(foretoken.load("novels")) as engine:
            ...     engine.step()
            []
        """
        self._require_open()
        self._core.refuse_reentry()
        try:
            self._stats.steps += self._core.step()
        except RefusedError as error:  # names no sequence: all that joined or ran fail
            self._core.fail(error)
        with self._core.pause():
            events = [self._make_event(*entry) for entry in list(self._streams.items())]
        return [event for event in events if event is not None]

    def abort(self, id: int) -> None:
        """Abort a request, running or waiting.

        Args:
            id: The request's id.

        Raises:
            InputError: The request is unknown or finished.

        Examples:
            >>> import foretoken
            >>> with foretoken.Engine(foretoken.load("novels")) as engine:
            ...     engine.abort(engine.add("The captain looked", max_new_tokens=8))
            ...     engine.stats().aborted
            1
        """
        entry = self._streams.pop(id, None)
        if entry is None:
            raise InputError(
                f"request {format_value(id)} is unknown or finished; give the id of a request that "
                "runs or waits"
            )
        self._stats.aborted += 1
        self._core.abort([entry.seq])

    @property
    def max_rows(self) -> int:
        """Maximum number of requests that run at a time."""
        return self._core.scheduler.max_rows

    @property
    def max_length(self) -> int | None:
        """Maximum tokens of a sequence, prompt included; None: no limit."""
        limits = [
            n for n in (self._options.max_length, self._spec.target.max_context) if n is not None
        ]
        return min(limits, default=None)

    @property
    def running(self) -> int:
        """Requests that have started and whose last event is still to come."""
        return len(self._streams) - self.waiting

    @property
    def waiting(self) -> int:
        """Requests that have not started."""
        return sum(not entry.seq.start_time for entry in list(self._streams.values()))

    def stats(self) -> EngineStats:
        """Return a copy of the engine's counters.

        Returns:
            The counters.
        """
        preempted = self._core.scheduler.preempted
        return replace(self._stats, running=self.running, waiting=self.waiting, preempted=preempted)

    def close(self) -> None:
        """Abort all requests; the Speculator can have another engine afterwards."""
        self._core.refuse_reentry()
        self._closed = True
        if not self._released:  # an interrupted call is completed by the next call
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
            raise InputError("the engine is closed; make another engine")

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
    """Raise InputError unless `begun` is a PartialOutput whose ids are in 0..V-1."""
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
            raise InputError(f"begun has the id {format_value(token)}; ids must be in 0..{V - 1}")
