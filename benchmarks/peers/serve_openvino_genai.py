"""OpenVINO GenAI's continuous batching behind a minimal HTTP loop, for serving_peers.py: streamed
completions of token ids, greedy, to their full length.

    .peers/openvino-genai/bin/python serve_openvino_genai.py TARGET DTYPE PYTHON PORT

PYTHON: the project's own, which exports the model. One thread takes the steps, one more serves each
request; an event says how many tokens there are, without text.
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


class Loop(Thread):
    """The pipeline, and the thread that takes its steps."""

    def __init__(self, target: str, dtype: str, python: str) -> None:
        super().__init__(daemon=True)
        request = {"python": python, "threads": os.cpu_count(), "setting": ""}
        folder, hints = export(request, target, dtype)
        plan = genai.SchedulerConfig()
        self.pipeline = genai.ContinuousBatchingPipeline(folder, plan, "CPU", hints)
        self.numbers, self.awake = count(), Condition()
        self.open: dict[int, tuple[Any, Queue[int]]] = {}

    def add(self, ids: list[int], length: int) -> Queue[int]:
        """Returns how many tokens each step gives; 0 at the end."""
        config = genai.GenerationConfig(max_new_tokens=length, ignore_eos=True, do_sample=False)
        config.set_eos_token_id(0)  # it takes none for -1, and refuses that; nothing stops there
        gains: Queue[int] = Queue()
        with self.awake:
            number = next(self.numbers)
            prompt = ov.Tensor(np.array([ids], dtype=np.int64))
            self.open[number] = self.pipeline.add_request(number, prompt, config), gains
            self.awake.notify()
        return gains

    def run(self) -> None:
        while True:
            with self.awake:
                self.awake.wait_for(lambda: self.open)
                requests = list(self.open.items())
            self.pipeline.step()
            for number, (handle, gains) in requests:
                while handle.can_read():
                    for output in handle.read().values():
                        gains.put(len(output.generated_ids))
                if handle.get_status() != genai.GenerationStatus.RUNNING:
                    gains.put(0)
                    with self.awake:
                        del self.open[number]


class Handler(BaseHTTPRequestHandler):
    loop: Loop

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        gains, length = self.loop.add(body["prompt"], body["max_tokens"]), 0
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        while gained := gains.get():
            length += gained
            self._event({"choices": [{"index": 0, "text": ""}]})
        self._event({"choices": [], "usage": {"completion_tokens": length}})

    def _event(self, chunk: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


def main() -> None:
    *model, port = sys.argv[1:]
    Handler.loop = Loop(*model)
    Handler.loop.start()
    ThreadingHTTPServer.request_queue_size = 64
    ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main()
