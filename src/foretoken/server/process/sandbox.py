"""Separate processes that decode media and compile grammars of clients. A few bytes of media or
grammar may take hours or all memory, or crash a C library. Unlike a thread, a process can be killed
then. A sandbox process also ends itself if an answer takes too long.

A question or answer is a line of JSON followed by bytes; the first message to a process holds its
settings. `python -m foretoken.server.process.sandbox KIND` runs such a process. The process must
not import torch, so only functions for the engine's process import the grammar module here.
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from io import BufferedReader
from threading import Lock
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from foretoken.errors import InputError
from foretoken.media.audio import load_audio
from foretoken.media.images import load_image
from foretoken.shared_cache import SharedCache

if TYPE_CHECKING:
    from foretoken.sampling.checks import Structured

try:
    import resource
except ImportError:  # on Windows
    resource = None

TIMEOUT_SECONDS = 10.0  # per answer
MAX_MEMORY_BYTES = 4 * 2**30  # limit of a process's address space
MAX_CACHED_GRAMMARS = 256  # number of grammars that are known to compile

Message = tuple[dict[str, Any], bytes]
Handler = Callable[[dict[str, Any], bytearray], Message]


class Sandbox:
    """Client of a sandbox process. The process starts with the first question, and is replaced if
    it fails to answer a question.

    Args:
        kind: The process's work, a key of HANDLER_FACTORIES.
        task: The work as a verb, such as "decode", for error messages.
        remedy: The remedy in error messages.
    """

    def __init__(self, kind: str, task: str, remedy: str) -> None:
        self._kind, self._task, self._remedy = kind, task, remedy
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = Lock()

    def ask(
        self, place: str, question: dict[str, Any], body: bytes = b""
    ) -> tuple[dict[str, Any], bytearray]:
        """Send a question and return the answer, each as JSON fields and bytes. `place`: the
        location of the data in the request, for the error. Raises InputError if the answer takes
        more than TIMEOUT_SECONDS or MAX_MEMORY_BYTES, or crashes the process."""
        with self._lock:
            if self._process is None:
                self._process = self._start()
            process = self._process
            assert process.stdin is not None and process.stdout is not None
            try:
                _write(process.stdin, question, body)
                answer = _read_message(cast(BufferedReader, process.stdout))
            except OSError:
                answer = None
            if answer is None:
                self._end_process()
                limits = f"{TIMEOUT_SECONDS:g} s or {MAX_MEMORY_BYTES // 2**30} GB to {self._task}"
                raise InputError(f"{place} takes more than {limits}; {self._remedy}")
            return answer

    def close(self) -> None:
        """Kill the process, also while it works on an answer."""
        process = self._process
        if process is not None:
            process.kill()  # before taking the lock, which `ask` holds during an answer
        with self._lock:
            self._end_process()

    def _get_settings(self) -> dict[str, Any]:
        """Return the settings to send to a new process in its first message."""
        return {}

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, self._kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdin is not None
        _write(
            process.stdin,
            {**self._get_settings(), "limits": [TIMEOUT_SECONDS, MAX_MEMORY_BYTES]},
            b"",
        )
        return process

    def _end_process(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        with suppress(OSError):  # unsent bytes
            self._process.__exit__(None, None, None)
        self._process = None


class GrammarSandbox(Sandbox):
    """Sandbox that compiles grammars for one tokenizer before the engine does, so that a grammar
    that takes too long to compile never reaches the engine."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__("grammar", "compile", "make it simpler")
        self._tokenizer = tokenizer
        self._compiled: SharedCache[None] = SharedCache(MAX_CACHED_GRAMMARS)

    def _get_settings(self) -> dict[str, Any]:
        return {"tokenizer": _import_grammar().serialize_tokenizer(self._tokenizer)}

    def require(self, structured: Structured) -> None:
        """Raise InputError if compiling a grammar exceeds the limits of time or memory. An invalid
        grammar passes; the engine reports it."""
        self._compiled.get(structured, self._compile, structured)

    def _compile(self, structured: Structured) -> None:
        if find_spec("llguidance") is None or not getattr(self._tokenizer, "is_fast", False):
            return  # the engine's error is clearer
        self.ask(
            f"structured's {structured.kind}",
            {"grammar": _import_grammar().to_llguidance(structured)},
        )


def _import_grammar():  # not annotated, so that the module's type is inferred
    from foretoken.controls import grammar

    return grammar


class MediaSandbox(Sandbox):
    """Sandbox that decodes images of at most `max_pixels` pixels and audio of at most `max_seconds`
    seconds."""

    def __init__(self, max_pixels: int, max_seconds: float) -> None:
        super().__init__("media", "decode", "send a smaller file")
        self._limits = {"pixels": max_pixels, "seconds": max_seconds}

    def decode_image(self, file: bytes, place: str) -> NDArray[np.uint8]:
        """Decode an image file to pixels `[H, W, 3]`. `place`: the file's location in the request,
        for error messages. Raises InputError if the file cannot be decoded within the limits."""
        return self._decode("uint8", file, kind="picture", place=place)

    def decode_audio(self, file: bytes, rate: int, place: str) -> NDArray[np.float32]:
        """Decode an audio file to samples `[n]` at `rate` Hz, like `decode_image`."""
        return self._decode("float32", file, kind="sound", place=place, rate=rate)

    def _decode(self, dtype: str, file: bytes, **question: Any) -> NDArray[Any]:
        fields, values = self.ask(question["place"], question | self._limits, file)
        if "problem" in fields:
            raise InputError(fields["problem"])
        return np.frombuffer(values, dtype).reshape(fields["shape"])


def make_grammar_compiler(settings: dict[str, Any]) -> Handler:
    """Return the handler of a sandbox process that compiles grammars."""
    from llguidance import LLMatcher, LLTokenizer

    # compilation does not depend on the EOS token
    lexicon = LLTokenizer(settings["tokenizer"], eos_token=0)

    def compile_grammar(question: dict[str, Any], _: bytearray) -> Message:
        matcher = LLMatcher(lexicon, question["grammar"], log_level=0)
        if not matcher.is_error():
            matcher.compute_ff_bytes()
            matcher.compute_bitmask()
        return {}, b""

    return compile_grammar


def make_media_decoder(_: dict[str, Any]) -> Handler:
    """Return the handler of a sandbox process that decodes images and audio."""

    def decode(question: dict[str, Any], file: bytearray) -> Message:
        place = question["place"]
        try:
            if question["kind"] == "picture":
                values = np.asarray(load_image(bytes(file), place, question["pixels"]))
            else:
                values = load_audio(bytes(file), question["rate"], place, question["seconds"])
        except InputError as error:
            return {"problem": str(error)}, b""
        return {"shape": values.shape}, values.tobytes()

    return decode


HANDLER_FACTORIES: dict[str, Callable[[dict[str, Any]], Handler]] = {
    "grammar": make_grammar_compiler,
    "media": make_media_decoder,
}


def run_sandbox(kind: str) -> None:
    """Run a sandbox process: answer questions from standard input until it is closed."""
    questions, answers = cast(BufferedReader, sys.stdin.buffer), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries may print to standard output
    first = _read_message(questions)
    assert first is not None
    (seconds, size), respond = first[0]["limits"], HANDLER_FACTORIES[kind](first[0])
    with suppress(ValueError, OSError):
        if resource:
            resource.setrlimit(resource.RLIMIT_AS, (size, size))
    while (question := _read_message(questions)) is not None:
        faulthandler.dump_traceback_later(seconds, exit=True)  # works while C code holds the GIL
        fields, body = respond(*question)
        faulthandler.cancel_dump_traceback_later()
        _write(answers, fields, body)


def _write(pipe: IO[bytes], fields: dict[str, Any], body: bytes) -> None:
    pipe.write(json.dumps({**fields, "bytes": len(body)}).encode() + b"\n")
    pipe.write(body)
    pipe.flush()


def _read_message(pipe: BufferedReader) -> tuple[dict[str, Any], bytearray] | None:
    """Return the JSON fields and the bytes of the next message; None if the other end is closed."""
    line = pipe.readline()
    if not line.endswith(b"\n"):
        return None
    fields = json.loads(line)
    body = bytearray(fields.pop("bytes"))  # read in place: it may be large
    return (fields, body) if pipe.readinto(body) == len(body) else None


if __name__ == "__main__":
    run_sandbox(sys.argv[1])
