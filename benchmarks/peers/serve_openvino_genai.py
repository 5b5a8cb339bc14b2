"""OpenVINO GenAI's continuous batching behind a minimal HTTP loop, for serving_peers.py: streamed
completions of token ids, greedy, to their full length.

    .peers/openvino-genai/bin/python benchmarks/peers/serve_openvino_genai.py TARGET PYTHON PORT

PYTHON: the project's own, which exports the model. One thread takes the steps, one more serves each
request; chunks hold ids, and no text.
"""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from queue import Queue
from threading import Condition, Thread
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from peer_openvino_genai import export

Tokens = Queue[list[int]]  # of each step; [] at the end


class Loop(Thread):
    """The pipeline, and the thread that takes its steps."""

    def __init__(self, target: str, python: str) -> None:
        super().__init__(daemon=True)
        request = {"python": python, "threads": os.cpu_count()}
        folder, hints = export(request, target, "float32")
        plan = genai.SchedulerConfig()
        self.pipeline = genai.ContinuousBatchingPipeline(folder, plan, "CPU", hints)
        self.numbers, self.awake = count(), Condition()
        self.open: dict[int, tuple[Any, Tokens]] = {}

    def add(self, ids: list[int], length: int) -> Tokens:
        config = genai.GenerationConfig(max_new_tokens=length, ignore_eos=True, do_sample=False)
        config.set_eos_token_id(0)  # it takes none for -1, and refuses that; nothing stops there
        tokens: Tokens = Queue()
        with self.awake:
            number = next(self.numbers)
            prompt = ov.Tensor(np.array([ids], dtype=np.int64))
            self.open[number] = self.pipeline.add_request(number, prompt, config), tokens
            self.awake.notify()
        return tokens

    def run(self) -> None:
        while True:
            with self.awake:
                self.awake.wait_for(lambda: self.open)
                requests = list(self.open.items())
            self.pipeline.step()
            for number, (handle, tokens) in requests:
                while handle.can_read():
                    for output in handle.read().values():
                        tokens.put(list(output.generated_ids))
                if handle.get_status() != genai.GenerationStatus.RUNNING:
                    tokens.put([])
                    with self.awake:
                        del self.open[number]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    loop: Loop

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens, length = self.loop.add(body["prompt"], body["max_tokens"]), 0
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while ids := tokens.get():
            length += len(ids)
            self._event({"choices": [{"index": 0, "text": "", "token_ids": ids}]})
        last = {"index": 0, "text": "", "token_ids": [], "finish_reason": "length"}
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": length}
        self._event({"choices": [last], "usage": usage})
        self._write(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, chunk: dict[str, Any]) -> None:
        self._write(f"data: {json.dumps(chunk)}\n\n".encode())

    def _write(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


def main() -> None:
    target, python, port = sys.argv[1:]
    Handler.loop = Loop(target, python)
    Handler.loop.start()
    Server(("127.0.0.1", int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main()
