"""The main loop of an engine's process. One thread receives messages from the pipe, other threads
prepare the requests, and the main thread runs the engine's steps and sends the outputs."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from threading import Condition, Lock, Thread
from typing import Any, cast

from foretoken.engine.engine import Engine, Event
from foretoken.errors import InputError, to_one_line
from foretoken.server.process.messages import (
    Abort,
    Add,
    Ask,
    FromEngine,
    GenerateRequest,
    Refusal,
    Reply,
    StepOutput,
    StepOutputs,
    Stop,
    ToEngine,
    TranscribeRequest,
    holds_media,
)
from foretoken.server.process.outputs import OutputConverter, to_refusal
from foretoken.server.process.preparation import (
    EngineRequest,
    PromptEncoder,
    RequestPreparer,
    blame_function,
)
from foretoken.server.process.queries import Queries, describe_models
from foretoken.server.process.replies import ReplyPreparer
from foretoken.server.process.sandbox import GrammarSandbox, MediaSandbox
from foretoken.server.process.transcriber import Transcriber
from foretoken.speculator import Speculator
from foretoken.text.decoding import TokenSpelling

LONG_PROMPT_SIZE = 20_000  # characters or ids; longer prompts are prepared in their own thread
SANDBOX_THREADS = 4  # for requests with grammars or media; they mostly wait for sandboxes
log = logging.getLogger(__name__)


class Worker:
    """Receives requests from a pipe, runs them with an engine, and sends back the outputs."""

    def __init__(
        self,
        pipe: Connection,
        spec: Speculator,
        engine: Engine,
        replies: ReplyPreparer,
        media: MediaSandbox,
    ) -> None:
        self.pipe, self.engine, self.media = pipe, engine, media
        self.info = describe_models(spec, engine, replies)
        self.sandbox, spelling = GrammarSandbox(spec.tokenizer), TokenSpelling(spec.tokenizer)
        prompts = PromptEncoder(spec, engine.max_length, media)
        self.preparer = RequestPreparer(spec, prompts, replies, spelling, self.sandbox)
        self.queries = Queries(spec, prompts, replies, spelling)
        self.outputs = OutputConverter(spelling, spec.ends.eos)
        self.transcriber = Transcriber(spec, media, self._send)
        # By request id, the same on the pipe and in the engine; None while a request is prepared
        self.requests: dict[int, EngineRequest | None] = {}
        self.short_pool = ThreadPoolExecutor(1, "foretoken prompts")  # in the order of arrival
        self.long_pool = ThreadPoolExecutor(1, "foretoken long prompts")
        self.sandbox_pool = ThreadPoolExecutor(SANDBOX_THREADS, "foretoken grammars and media")
        self.send_lock, self.changed = Lock(), Condition()
        self.stopped = False

    def run(self) -> None:
        """Run the engine's steps until the HTTP process sends `Stop` or closes the pipe."""
        Thread(target=self._receive, name="foretoken requests", daemon=True).start()
        self._send(self.info)
        while self._wait_for_requests():
            try:
                events = self.engine.step()
            except Exception as error:  # the request that caused the error is unknown
                log.exception("a step failed")
                self._fail_all(to_one_line(error))
            else:
                self._send_events(events)
        self.transcriber.close()
        for pool in (self.short_pool, self.long_pool, self.sandbox_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        self.sandbox.close()
        self.media.close()

    def _wait_for_requests(self) -> bool:
        """Wait until the engine has requests and return True, or False if the process must end."""
        with self.changed:
            engine = self.engine
            self.changed.wait_for(lambda: engine.running or engine.waiting or self.stopped)
            return not self.stopped

    def _receive(self) -> None:
        """Receive and dispatch messages, in a thread. When this thread ends, for whatever reason,
        the process ends."""
        try:
            while not isinstance(message := self.pipe.recv(), Stop):
                self._dispatch(message)
        except (EOFError, OSError):  # the HTTP process has ended
            pass
        finally:
            with self.changed:
                self.stopped = True
                self.changed.notify()

    def _dispatch(self, message: ToEngine) -> None:
        match message:
            case Add(id, TranscribeRequest() as request):
                self.transcriber.start(id, request)
            case Add(id, GenerateRequest() as request):
                with self.changed:
                    self.requests[id] = None
                inputs = request.prompt, request.prediction, request.chat_template_kwargs
                pool = self.sandbox_pool if request.is_constrained else self._choose_pool(*inputs)
                pool.submit(self._add_request, id, request)
            case Ask(id, _, arguments):
                self._choose_pool(*arguments.values()).submit(self._answer, message)
            case Abort(id):
                if not self.transcriber.cancel(id):
                    self._abort(id)
            case _:
                pass

    def _choose_pool(self, *values: Any) -> ThreadPoolExecutor:
        """Return the thread pool in which to prepare a prompt and its variables. Short prompts have
        their own pool, so that they do not wait for long prompts or for media."""
        lists = [cast(list[Any], each) for each in values if isinstance(each, list)]
        if any(map(holds_media, lists)):
            return self.sandbox_pool
        count = sum(map(len, lists))
        long = count > LONG_PROMPT_SIZE or sum(len(str(each)) for each in values) > LONG_PROMPT_SIZE
        return self.long_pool if long else self.short_pool

    def _answer(self, question: Ask) -> None:
        try:
            value = getattr(self.queries, question.name)(**question.arguments)
            self._send(Reply(question.id, value))
        except Exception as error:
            self._send(to_refusal(question.id, error))

    def _add_request(self, id: int, request: GenerateRequest) -> None:
        if id not in self.requests:  # aborted before its turn
            return
        try:
            added, arguments = self.preparer.prepare(id, request)
            with (
                self.changed
            ):  # the request is registered before the engine reports its first event
                if id not in self.requests:  # aborted meanwhile
                    return
                self.requests[id] = added
            self.engine.add(**arguments)
        except Exception as error:
            with self.changed:
                self.requests.pop(id, None)
            self._send(to_refusal(id, blame_function(request, error)))
            return
        with self.changed:
            if id in self.requests:
                self._send_accepted(added)
                self.changed.notify()
            else:  # aborted meanwhile, or finished already
                self._abort_in_engine(id)

    def _send_accepted(self, request: EngineRequest) -> None:
        if not request.accepted_sent:
            request.accepted_sent = True
            self._send(request.accepted)

    def _abort(self, id: int) -> None:
        with self.changed:
            if self.requests.pop(id, None) is not None:
                self._abort_in_engine(id)
            self._send_outputs([])  # reports the new counts, as there may be no further step

    def _abort_in_engine(self, id: int) -> bool:
        """Abort a request in the engine. Return False if the engine does not have it."""
        try:
            self.engine.abort(id)
        except InputError:  # the request has just finished, or is not added yet
            return False
        return True

    def _fail_all(self, message: str) -> None:
        """Abort all requests and report their failure. Requests are not continued after a failed
        step, as the next step may fail for the same reason."""
        with self.changed:
            failed = [
                id
                for id, request in self.requests.items()
                if request is not None and (self._abort_in_engine(id) or request.accepted_sent)
            ]
            for id in failed:
                del self.requests[id]
            self._send_outputs([Refusal(id, "failed", message) for id in failed])

    def _send_events(self, events: list[Event]) -> None:
        """Send the outputs of a step. Events of aborted requests are dropped."""
        outputs: list[StepOutput | Refusal] = []
        with self.changed:
            for event in events:
                request = self.requests.get(event.id)
                if request is None:  # aborted meanwhile
                    continue
                if event.finish_reason is not None:
                    del self.requests[event.id]
                self._send_accepted(request)
                outputs.append(self.outputs.convert(event, request))
        self._send_outputs(outputs)

    def _send_outputs(self, outputs: list[StepOutput | Refusal]) -> None:
        """Send outputs, with the engine's current counts of requests and preemptions."""
        stats = self.engine.stats()
        self._send(StepOutputs(outputs, stats.running, stats.waiting, stats.preempted))

    def _send(self, message: FromEngine) -> None:
        with self.send_lock:
            try:
                self.pipe.send(message)
            except OSError:  # the HTTP process has ended; `_receive` ends this process
                pass
