"""The engine's own process: one thread hears requests, others prepare them, one takes the steps.

It is spawned with plain data, loads the models itself, and talks through a pipe, so that nothing a
model or a C library does can take the HTTP process with it.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import pickle
import signal
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from statistics import median
from threading import Condition, Lock, Thread
from threading import Event as Flag
from time import monotonic
from typing import TYPE_CHECKING, Any, cast

from foretoken.engine.options import AllEngineKeywords
from foretoken.errors import (
    BusyError,
    ControlError,
    ForetokenError,
    InputError,
    about,
    base_name,
    one_line,
)
from foretoken.sampling.checks import as_structured
from foretoken.sampling.params import Controls
from foretoken.server.options import Logs
from foretoken.server.process.messages import (
    Abort,
    Accepted,
    Add,
    Ask,
    Done,
    Failed,
    FromEngine,
    GenerateRequest,
    Heard,
    Kind,
    ModelInfo,
    Pace,
    Prompt,
    Ready,
    Refusal,
    Reply,
    StepOutput,
    StepOutputs,
    Stop,
    TokenLogprob,
    Transcribe,
    TranscribeRequest,
    holds_media,
    is_chat,
)
from foretoken.slow_log import log_if_slow
from foretoken.text.chat import parts_of, rate
from foretoken.text.decoding import Spelling, count_offsets, decode
from foretoken.theory import steps_factor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from foretoken.engine.engine import Engine, Event
    from foretoken.loading.target import KnownTarget
    from foretoken.media.inputs import Media
    from foretoken.request import Completion
    from foretoken.sampling.logprobs import Logprobs
    from foretoken.server.process.media_sandbox import MediaSandbox
    from foretoken.server.process.replies import Replies
    from foretoken.speculator import Speculator

WIDEST = 128  # characters of a token at most, in any text that is not made to be refused
LONG = 20_000  # characters and ids that take more than a moment to prepare
LEAST = -9999.0  # a logprob that JSON can hold; as OpenAI's, for what is impossible
PREPARING = 4  # grammars and media at a time, most of whose work is done in sandboxes
SWITCH = 0.0005  # seconds: a thread that prepares a request yields to the engine's after that
LISTENING, SOUNDS = 4, 16  # sounds that are listened to at a time; with those that wait
BEAT = 1.0  # seconds between two words that a sound is being listened to
UNBOUNDED = 4096  # new tokens of a text, for a model without a context
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Setup:
    """Arguments that the engine's process is made from: those of `foretoken.load` and of
    `Engine`."""

    target: str | None
    draft: str | None
    loading: dict[str, Any] = field(default_factory=dict[str, Any])
    engine: AllEngineKeywords = field(default_factory=AllEngineKeywords)
    logs: Logs = Logs()
    costs: bytes | None = None  # what steps cost, where that was measured elsewhere
    adapters: tuple[str, ...] = ()  # of engines that start later: to be checked before it loads
    chat_template: str | None = None  # None: the model's own
    tool_parser: str = "auto"
    max_pixels: int = 25_000_000  # of a picture
    max_seconds: int = 3600  # of a sound


def work(pipe: Connection, setup: Setup) -> None:
    """The process's whole life."""
    for name in (signal.SIGINT, signal.SIGTERM):  # which reach the whole group: the pipe says when
        signal.signal(name, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH)
    setup.logs.begin()
    Thread(target=end_with, args=(parent_process(),), name="end", daemon=True).start()
    try:
        from transformers.utils import logging as transformers

        from foretoken.engine.engine import Engine
        from foretoken.loading.load import load_checked, require_adapters
        from foretoken.server.process.media_sandbox import MediaSandbox
        from foretoken.server.process.replies import Replies

        transformers.disable_progress_bar()
        require_adapters(setup.target, setup.adapters, **setup.loading)
        made: list[Replies] = []

        def read_replies(target: KnownTarget) -> None:
            made.append(Replies(target.tokenizer, setup.chat_template, setup.tool_parser))
            log.info("%s", made[0].described if made[0].template else _lacks(target))

        spec = load_checked(read_replies, setup.target, setup.draft, **setup.loading)
        name = base_name(spec.target_name)
        with log_if_slow(log, "choosing a draft for %s, once", name):
            spec = spec.prepared()
        if setup.costs is not None:
            spec.costing.freeze(pickle.loads(setup.costs))
        engine = Engine(spec, **setup.engine)
        spec.inputs.prepare_grammars()
        with log_if_slow(log, "measuring what steps of %s cost", name):
            measure(spec, engine.max_rows)
        # Or collections would look through all that was loaded: pauses of a tenth of a second
        gc.collect()
        gc.freeze()
    except (ForetokenError, OSError) as error:
        pipe.send(Failed(one_line(error)))
        return
    with engine:
        media = MediaSandbox(setup.max_pixels, setup.max_seconds)
        Worker(pipe, spec, engine, made[0], media).run()


def _lacks(target: KnownTarget) -> str:
    """Say which requests a target without a tokenizer or chat template answers, and the remedy."""
    name = base_name(target.name)
    if target.tokenizer is None:
        return f"{name} has no tokenizer, so requests must hold token ids; --tokenizer names one"
    return f"{name} has no chat template, so chats are refused; --chat-template FILE gives one"


def end_with(parent: BaseProcess | None) -> None:
    """A thread's life: a process that loads, or whose step hangs, hears no pipe."""
    if parent is not None:
        parent.join()
        os._exit(1)


def measure(spec: Speculator, rows: int) -> None:
    """Measure the costs of greedy and sampled steps before requests wait for them. Predictions
    need them without a draft, too."""
    from foretoken.sampling.params import SamplingParams

    sampled = SamplingParams(temperature=0.7, top_k=50, top_p=0.9)
    for params in (SamplingParams(), sampled):
        spec.costing.step_costs(params, rows, again=True)


@dataclass(slots=True)
class EngineRequest:
    """A request that the engine has, and what is told of it once it is accepted."""

    accepted: Accepted
    show_steps: bool
    length: int  # tokens that prompt and text may have
    plain: bool  # asked for without draft tokens, which is more than that it had none
    mixed: bool  # its time is not of its own steps: begun in another engine, or waits for drafts
    offsets: list[int]  # of the prompt's tokens, where it is echoed
    told: bool = False


class Worker:
    """An engine between two ends of a pipe."""

    def __init__(
        self,
        pipe: Connection,
        spec: Speculator,
        engine: Engine,
        replies: Replies,
        media: MediaSandbox,
    ) -> None:
        from foretoken.server.process.grammar_sandbox import GrammarSandbox

        self.pipe, self.spec, self.engine = pipe, spec, engine
        self.replies, self.media = replies, media
        self.spelling = Spelling(spec.tokenizer)
        self.widest = _widest(spec.tokenizer)
        # By the pipe's ids, which are the engine's too; None while a request is checked
        self.requests: dict[int, EngineRequest | None] = {}
        self.sandbox = GrammarSandbox(spec.tokenizer)
        self.short = ThreadPoolExecutor(1, "foretoken prompts")  # in the order of arrival
        self.long = ThreadPoolExecutor(1, "foretoken long prompts")
        self.sandboxed = ThreadPoolExecutor(PREPARING, "foretoken grammars and media")
        self.listening = ThreadPoolExecutor(LISTENING, "foretoken sounds")
        self.sounds: dict[int, Flag] = {}  # set where nobody waits any more
        self.sending, self.awake = Lock(), Condition()
        self.over = False

    def run(self) -> None:
        """Take steps until the other end says stop or is gone."""
        Thread(target=self._listen, name="foretoken requests", daemon=True).start()
        self._send(Ready(self._info()))
        while self._wait():
            try:
                events = self.engine.step()
            except Exception as error:  # nobody knows of which request
                log.exception("a step failed")
                self._fail(one_line(error))
                continue
            self._tell(events)
        for gone in [*self.sounds.values()]:
            gone.set()
        for pool in (self.short, self.long, self.sandboxed, self.listening):
            pool.shutdown(wait=False, cancel_futures=True)
        self.sandbox.close()
        self.media.close()

    def _listen(self) -> None:
        """A thread's life: what is asked. The process ends with it, whatever ended it."""
        try:
            self._hear()
        finally:
            with self.awake:
                self.over = True
                self.awake.notify()

    def _hear(self) -> None:
        while True:
            try:
                message = self.pipe.recv()
            except (EOFError, OSError):  # the HTTP process is gone
                message = Stop()
            match message:
                case Add(id, request):
                    with self.awake:
                        self.requests[id] = None
                    own = request.prompt, request.prediction, request.chat_template_kwargs
                    pool = self.sandboxed if request.constrained else self._pool(*own)
                    pool.submit(self._add, id, request)
                case Transcribe(id, request):
                    self._listen_to(id, request)
                case Abort(id):
                    self._abort(id)
                case Ask(id, name, arguments):
                    self._pool(*arguments.values()).submit(self._answer, id, name, arguments)
                case _:
                    return

    def _pool(self, *values: Any) -> ThreadPoolExecutor:
        """Return the threads that prepare a prompt and its variables, so that short prompts wait
        for short ones only."""
        lists = [cast(list[Any], each) for each in values if isinstance(each, list)]
        if any(map(holds_media, lists)):
            return self.sandboxed
        long = sum(map(len, lists)) > LONG or sum(len(str(each)) for each in values) > LONG
        return self.long if long else self.short

    def _wait(self) -> bool:
        """Until there is something to do; False at the end."""
        with self.awake:
            engine = self.engine
            self.awake.wait_for(lambda: engine.running or engine.waiting or self.over)
            return not self.over

    def _add(self, id: int, request: GenerateRequest) -> None:
        if id not in self.requests:  # aborted before its turn
            return
        try:
            prompt, ids, limit, prediction = self._checked(request)
            accepted, offsets = self._accepted(id, request, ids)
            controls = self._controls(request, accepted.tail)
            added = EngineRequest(
                accepted,
                request.show_steps,
                length=len(ids) + limit,
                plain=request.gamma == 0,
                mixed=request.begun is not None,
                offsets=offsets,
            )
            with self.awake:  # before its first event
                if id not in self.requests:  # aborted meanwhile
                    return
                self.requests[id] = added
            self.engine.add(
                cast(Any, prompt),
                id=id,
                seed=request.seed,
                gamma=request.gamma,
                rule=request.rule,
                lenience=request.lenience,
                cache_salt=request.cache_salt,
                priority=request.priority,
                prediction=prediction,
                begun=request.begun,
                **{**controls, "max_new_tokens": limit},
            )
        except Exception as error:
            with self.awake:
                self.requests.pop(id, None)
            self._refuse(id, _of_a_function(request, error))
            return
        with self.awake:
            if id in self.requests:
                self._accept(added)
                self.awake.notify()
            else:  # aborted meanwhile, or at its end already
                self._drop(id)

    def _checked(
        self, request: GenerateRequest
    ) -> tuple[list[int] | Media, list[int], int, list[int] | None]:
        """The prompt and its ids, how many new tokens may follow, and the prediction's ids."""
        controls, prediction = request.controls, None
        with about("prompt"):
            prompt, variables = self.replies.messages(request), self.replies.variables(request)
            read = self._read(prompt, request.chat_template, variables)
            ids = read if isinstance(read, list) else read.ids
        limit = self._limit(len(ids), controls.get("max_new_tokens"), request.most_tokens)
        if request.prediction is not None:
            with about("prediction"):
                self._require_short(request.prediction, "prediction")
                prediction = list(self.spec.inputs.prediction(request.prediction))
                context = self.engine.longest
                if context is not None and len(prediction) > context:
                    raise _TooLongError(
                        f"the prediction has {len(prediction)} tokens, the context is {context}; "
                        "shorten it"
                    )
        return read, ids, limit, prediction

    def _controls(self, request: GenerateRequest, tail: str) -> Controls:
        """The request's controls, with those of its reply; its grammar compiles."""
        controls = request.controls
        if request.wish is not None:
            controls = controls | self.replies.controls(request, tail)
        if request.bad_words:
            with about("bad_words"):
                controls = controls | self._banned(request.bad_words)
        if structure := controls.get("structured"):
            with about("structured"):
                self.sandbox.require(as_structured("structured", structure))
        return controls

    def _banned(self, texts: tuple[str, ...]) -> Controls:
        """The ids of texts, as they begin a text and as they stand behind a space."""
        if self.spec.tokenizer is None:
            raise InputError("bad_words needs a tokenizer, and the model has none; leave it out")
        spelled = [self.spec.inputs.prediction(lead + text) for text in texts for lead in ("", " ")]
        return {"bad_words_ids": [ids for ids in dict.fromkeys(spelled) if ids]}

    def _accepted(
        self, id: int, request: GenerateRequest, ids: list[int]
    ) -> tuple[Accepted, list[int]]:
        """Return the acceptance of a request, and its prompt's offsets in the echo."""
        tail = "" if request.wish is None else self.replies.tail(ids)
        told = ids if request.tell_ids else None
        if not request.echo:
            return Accepted(id, len(ids), tail=tail, ids=told), []
        prompt, tokenizer = request.prompt, self.spec.tokenizer
        if tokenizer is None:
            raise InputError("echo needs a tokenizer, and the model has none; leave it out")
        if not isinstance(prompt, str):
            prompt = decode(tokenizer, ids)
        logprobs = request.controls.get("prompt_logprobs") is not None
        offsets = count_offsets(tokenizer, ids, prompt) if logprobs else []
        first = TokenLogprob(*self.spelling.word(ids[0]), 0.0, [], ids[0], 1, 0)
        return Accepted(id, len(ids), prompt, (first,), tail, told), offsets

    def _accept(self, request: EngineRequest) -> None:
        if not request.told:
            request.told = True
            self._send(request.accepted)

    def _read(
        self, prompt: Prompt, template: str | None, variables: dict[str, Any] | None
    ) -> list[int] | Media:
        """The ids of a text, of ids, or of messages through a chat template, which may hold media
        too."""
        self._require_short(prompt)
        if holds_media(prompt):
            messages: Any = [self._decoded(i, turn) for i, turn in enumerate(cast(Any, prompt))]
            return cast(Any, self.spec.inputs.prompts(messages, template, variables)[0])
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            return self.spec.inputs.ids(cast(list[int], prompt))
        (formatted,) = self.spec.inputs.prompts(cast(Any, prompt), template, variables)
        return self.spec.inputs.ids(formatted)

    def _decoded(self, i: int, message: dict[str, Any]) -> dict[str, Any]:
        """A message with its pictures and sounds as arrays."""
        assert self.spec.processor is not None  # messages of others hold no media
        hertz = rate(self.spec.processor())

        def decoded(j: int, part: Mapping[str, Any]) -> dict[str, Any]:
            kind, place = part["type"], f"message {i}, part {j}"
            if kind == "image":
                return {"type": kind, kind: self.media.picture(part[kind], place)}
            if kind == "audio":
                return {"type": kind, kind: self.media.sound(part[kind], hertz, place)}
            return dict(part)

        read = [decoded(j, part) for j, part in enumerate(parts_of(message))]
        return message | {"content": read or message.get("content")}

    def _require_short(self, prompt: Prompt, name: str = "prompt") -> None:
        """Before it is tokenized, which takes seconds for a text of some MB."""
        context = self.engine.longest
        if context is None:
            return
        if isinstance(prompt, list) and not is_chat(prompt):
            if len(prompt) > context:
                raise _TooLongError(
                    f"the {name} has {len(prompt)} tokens, the context is {context}; shorten it"
                )
            return
        texts: list[Any] = [prompt]
        if is_chat(prompt):
            told = [(turn.get("content"), parts_of(turn)) for turn in prompt]
            texts = [text for text, read in told if not read]
            texts += [part.get("text") for _, read in told for part in read]
        size = sum(len(text or "") for text in texts)
        if size > self.widest * context:
            raise _TooLongError(
                f"the {name} has {size} characters, more than the context of {context} tokens can "
                "hold; shorten it"
            )

    def _limit(self, prompt: int, count: int | None, most: int | None) -> int:
        """New tokens of a text: as many as are asked for, else what the context leaves and the
        server allows."""
        context = self.engine.longest
        if context is not None and prompt + (count or 1) > context:
            behind = f" and max_tokens is {count}" if count else ""
            short = prompt < context
            remedy = "ask for fewer tokens" if short else "shorten it"
            raise _TooLongError(
                f"the prompt has {prompt} tokens{behind}, the context is {context}; {remedy}"
            ).about("max_new_tokens" if short else "prompt")
        if count is not None:
            return count
        room = UNBOUNDED if context is None else context - prompt
        return room if most is None else min(room, most)

    def _listen_to(self, id: int, request: TranscribeRequest) -> None:
        """Write a sound down, in a thread of its own: its windows share steps with other texts."""
        if len(self.sounds) >= SOUNDS:
            self._refuse(id, BusyError(""))
            return
        gone = self.sounds[id] = Flag()
        self.listening.submit(self._transcribe, id, request, gone)

    def _transcribe(self, id: int, request: TranscribeRequest, gone: Flag) -> None:
        from foretoken.speech.transcription import transcribe
        from foretoken.speech.windows import ear

        beat = 0.0

        def told(text: str) -> None:
            nonlocal beat
            if gone.is_set():
                raise _GoneError
            if text or monotonic() - beat > BEAT:
                beat = monotonic()
                self._send(Heard(id, text))

        try:
            assert self.spec.processor is not None  # it is said not to transcribe elsewhere
            hertz = ear(self.spec.processor()).sampling_rate
            with about("audio"):
                samples = self.media.sound(request.audio, hertz, "the file")
            written = transcribe(
                self.spec,
                samples,
                language=request.language,
                translate=request.translate,
                prompt=request.prompt,
                words=request.words,
                temperature=request.temperature,
                gamma=request.gamma,
                told=told,
            )
            self._send(Reply(id, written))
        except _GoneError:
            pass
        except Exception as error:
            self._refuse(id, error)
        finally:
            self.sounds.pop(id, None)

    def _abort(self, id: int) -> None:
        if id in self.sounds:
            self.sounds[id].set()
            return
        with self.awake:
            if self.requests.pop(id, None) is not None:
                self._drop(id)
            self._tell([])  # no step follows that of the last text

    def _answer(self, id: int, name: str, arguments: dict[str, Any]) -> None:
        questions = {
            "tokenize": self._tokenize,
            "detokenize": self._detokenize,
            "speculation": self._speculation,
        }
        try:
            self._send(Reply(id, questions[name](**arguments)))
        except Exception as error:
            self._refuse(id, error)

    def _tokenize(
        self,
        prompt: Prompt,
        template: str | None,
        chat_template_kwargs: dict[str, Any] | None,
        *,
        texts: bool,
    ) -> dict[str, Any]:
        if (chat_template_kwargs or {}).get("tools") and not self.replies.offers:
            problem = "the chat template reads no tools, and chats get them in a system message"
            raise InputError(f"{problem}; leave them out").about("tools")
        with about("prompt"):
            read = self._read(prompt, template, chat_template_kwargs)
            ids = read if isinstance(read, list) else read.ids
        return {"tokens": ids} | ({"token_strs": [*map(self.spelling.name, ids)]} if texts else {})

    def _detokenize(self, tokens: list[int]) -> str:
        with about("tokens"):
            ids = self.spec.inputs.ids(tokens)
        if self.spec.tokenizer is None:
            raise InputError("there is no tokenizer; the model has none")
        return decode(self.spec.tokenizer, ids)

    def _speculation(self, alpha: float | None, made: dict[int, int]) -> dict[str, Any]:
        """Return the costs of one row, for the sampling that was measured last, and the speed-up
        that they predict of one text with steps of as many draft tokens as were `made`; None where
        nothing is known yet."""
        costs = self.spec.costing.known()
        if costs is None:
            return {"c": None, "v": None, "predicted_speedup": None}
        predicted = None
        if alpha is not None and any(made.values()):
            predicted = steps_factor(min(1.0, alpha), made, costs.c, v=costs.v)
        table = [(n, costs.v(n)) for n, _ in costs.score]
        return {"c": costs.c, "v": table, "predicted_speedup": predicted}

    def _info(self) -> ModelInfo:
        from foretoken.drafters.none import NoDrafter
        from foretoken.speech.transcription import transcribes

        spec, tokenizer = self.spec, self.spec.tokenizer
        drafts = not isinstance(spec.drafter, NoDrafter)
        suggested = {name: spec.suggested.get(name) for name in ("temperature", "top_p", "top_k")}
        return ModelInfo(
            target=base_name(spec.target_name),
            draft=base_name(spec.draft_name) if drafts else None,
            context=self.engine.longest,
            vocab_size=spec.target.vocab_size,
            chat=bool(getattr(tokenizer, "chat_template", None)),
            text=tokenizer is not None,
            runtime=spec.target.runtime,
            draft_runtime=spec.drafter.runtime if drafts else None,
            dtype=spec.target.computed,
            replies=self.replies.facts,
            media=_media(spec),
            transcribes=transcribes(spec),
            suggested=suggested,
            max_rows=self.engine.max_rows,
            pid=os.getpid(),
            costs=pickle.dumps(spec.costing.measured),
        )

    def _tell(self, events: list[Event]) -> None:
        parts: list[StepOutput] = []
        drafts = any(step.drafted for event in events for step in event.steps)
        with self.awake:
            for event in events:
                request = self.requests.get(event.id)
                if request is None:  # aborted meanwhile
                    continue
                if event.finish_reason is not None:
                    del self.requests[event.id]
                self._accept(request)
                request.mixed |= request.plain and drafts
                if event.error is not None:
                    kind = "refused" if isinstance(event.error, ControlError) else "failed"
                    option = getattr(event.error, "option", None)
                    self._send(Refusal(event.id, kind, one_line(event.error), option))
                    continue
                parts.append(self._part(event, request))
        preempted = self.engine.stats().preempted
        self._send(StepOutputs(parts, self.engine.running, self.engine.waiting, preempted))

    def _part(self, event: Event, request: EngineRequest) -> StepOutput:
        words = None
        if request.show_steps:
            tokens = (token for step in event.steps for token in (*step.kept, *step.guesses))
            words = {token: self.spelling.text(token) for token in tokens}
        echoed = len(request.accepted.echo)
        offsets = [echoed + piece.offset for piece in event.pieces]
        return StepOutput(
            event.id,
            [piece.text for piece in event.pieces] or [""] * len(event.tokens),
            event.tokens,
            None if event.logprobs is None else self._known(event.logprobs, offsets),
            event.steps,
            None if event.completion is None else self._done(event.completion, request),
            words,
        )

    def _done(self, completion: Completion, request: EngineRequest) -> Done:
        likelihoods, stop = completion.prompt_logprobs, completion.stop_reason
        return Done(
            completion.finish_reason,
            None if stop in self.spec.ends.eos else stop,  # as vLLM: its own end needs no reason
            completion.stats,
            None if likelihoods is None else self._known(likelihoods, request.offsets[1:]),
            None if request.mixed else _pace(completion, request.length),
        )

    def _known(self, logprobs: list[Logprobs], offsets: list[int]) -> list[TokenLogprob]:
        """`offsets`: [] where they are not told."""
        word = self.spelling.word

        def known(each: Logprobs, offset: int) -> TokenLogprob:
            top = [(*word(token), max(LEAST, logprob), token) for token, logprob in each.top]
            own = (*word(each.token), max(LEAST, each.logprob))
            return TokenLogprob(*own, top, each.token, each.rank, offset)

        return [known(*pair) for pair in zip(logprobs, offsets or repeat(0), strict=False)]

    def _fail(self, message: str) -> None:
        """All requests end: what broke the step off may break the next one off too."""
        with self.awake:
            for id, request in list(self.requests.items()):
                if request is not None and (self._drop(id) or request.told):
                    del self.requests[id]
                    self._send(Refusal(id, "failed", message))
            self._tell([])  # no step follows this one

    def _drop(self, id: int) -> bool:
        """Abort a request; whether the engine had it."""
        try:
            self.engine.abort(id)
        except InputError:  # it has just finished, or is being added
            return False
        return True

    def _refuse(self, id: int, error: Exception) -> None:
        kind: Kind = "failed"
        if isinstance(error, _TooLongError):
            kind = "length"
        elif isinstance(error, BusyError):
            kind = "busy"
        elif isinstance(error, InputError):
            kind = "input"
        elif isinstance(error, ForetokenError):
            kind = "refused"
        else:
            log.exception("a request failed")
        busy = "the queue is full; send the request again later"
        option = getattr(error, "option", None)
        self._send(Refusal(id, kind, busy if kind == "busy" else one_line(error), option))

    def _send(self, message: FromEngine) -> None:
        with self.sending:
            try:
                self.pipe.send(message)
            except OSError:  # the HTTP process is gone; `_hear` ends this one
                pass


def _media(spec: Speculator) -> tuple[str, ...]:
    """The kinds of media that the target reads in messages."""
    from foretoken.models.base import ReadsMedia
    from foretoken.text.chat import kinds

    if spec.processor is None or not isinstance(spec.target, ReadsMedia):
        return ()
    try:
        return kinds(spec.processor())
    except InputError as error:  # what it needs is not installed
        log.warning("pictures and sounds are not read: %s", error)
        return ()


def _widest(tokenizer: PreTrainedTokenizerBase | None) -> int:
    """Return the most characters that a token can stand for. Byte-level tokenizers drop none, so
    it is their longest token; others may, and the result is a bound that no ordinary input meets.
    """
    longest = max(map(len, tokenizer.get_vocab()), default=1) if tokenizer is not None else 1
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.normalizer is not None:
        return max(WIDEST, longest)
    added: Any = getattr(tokenizer, "added_tokens_decoder", {}).values()
    strips = any(token.lstrip or token.rstrip for token in added)
    plain = "ByteLevel" in str(backend.pre_tokenizer) and not strips
    return longest if plain else max(WIDEST, longest)


def _pace(completion: Completion, length: int) -> Pace | None:
    """One of a single step has no time without its prompt's."""
    if len(completion.steps) < 2:
        return None
    tokens, seconds, steps = completion.steady
    return Pace(tokens, seconds, length, int(median(step.rows for step in steps)))


class _GoneError(Exception):
    """Nobody waits for a transcription any more."""


class _TooLongError(InputError):
    """A prompt and its limit, or a prediction, beyond the context."""


def _of_a_function(request: GenerateRequest, error: Exception) -> Exception:
    """Return the error, or where the grammar of calls does not compile one that names the function
    whose parameters cannot be followed."""
    if getattr(error, "option", None) != "structured" or request.wish is None:
        return error
    from foretoken.controls.grammar import objection  # late: torch, which is not needed here

    for function in request.wish.functions:
        if function.parameters and (reason := objection(json.dumps(function.parameters))):
            problem = f"the parameters of the function {function.name!r} cannot be followed"
            return InputError(f"{problem}: {reason}; correct them").about("tools")
    return error
