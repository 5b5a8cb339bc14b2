"""Run transcriptions, each in its own thread. The engine batches their steps with the steps of
other requests."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from threading import Event as Flag
from time import monotonic

from foretoken.errors import BusyError, name_option_in_errors
from foretoken.server.process.messages import (
    FromEngine,
    Reply,
    TranscribeRequest,
    TranscriptDelta,
)
from foretoken.server.process.outputs import to_refusal
from foretoken.server.process.sandbox import MediaSandbox
from foretoken.speculator import Speculator
from foretoken.speech.transcription import transcribe
from foretoken.text.chat import get_sampling_rate

MAX_RUNNING, MAX_OPEN = 4, 16  # maximum transcriptions that run; that run or wait
TRANSCRIPTION_HEARTBEAT_S = 1.0  # a running transcription sends a message at least this often


class Transcriber:
    """Runs transcriptions with one target. `send` sends a message to the HTTP process."""

    def __init__(
        self, spec: Speculator, media: MediaSandbox, send: Callable[[FromEngine], None]
    ) -> None:
        self.spec, self.media, self.send = spec, media, send
        self._threads = ThreadPoolExecutor(MAX_RUNNING, "foretoken transcriptions")
        self._cancelled: dict[int, Flag] = {}  # by id of open transcriptions

    def start(self, id: int, request: TranscribeRequest) -> None:
        """Queue a transcription, or refuse it if MAX_OPEN transcriptions run or wait."""
        if len(self._cancelled) >= MAX_OPEN:
            self.send(to_refusal(id, BusyError()))
            return
        self._cancelled[id] = Flag()
        self._threads.submit(self._transcribe, id, request, self._cancelled[id])

    def cancel(self, id: int) -> bool:
        """Cancel a transcription. Return False if no open transcription has this id."""
        cancelled = self._cancelled.get(id)
        if cancelled is not None:
            cancelled.set()
        return cancelled is not None

    def close(self) -> None:
        """Cancel all transcriptions."""
        for cancelled in [*self._cancelled.values()]:
            cancelled.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _transcribe(self, id: int, request: TranscribeRequest, cancelled: Flag) -> None:
        last_sent = 0.0

        def report(text: str) -> None:
            nonlocal last_sent
            if cancelled.is_set():
                raise _CancelledError
            if text or monotonic() - last_sent > TRANSCRIPTION_HEARTBEAT_S:
                last_sent = monotonic()
                self.send(TranscriptDelta(id, text))

        try:
            assert self.spec.processor is not None  # else the server refuses the request
            options = asdict(request)
            with name_option_in_errors("audio"):
                file, sampling_rate = options.pop("audio"), get_sampling_rate(self.spec.processor())
                samples = self.media.decode_audio(file, sampling_rate, "the file")
            self.send(Reply(id, transcribe(self.spec, samples, on_text=report, **options)))
        except _CancelledError:
            pass
        except Exception as error:
            self.send(to_refusal(id, error))
        finally:
            self._cancelled.pop(id, None)


class _CancelledError(Exception):
    """Raised in a transcription's thread after `cancel`."""
