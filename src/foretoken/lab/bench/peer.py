"""Another library on the same pair: a process of its own that answers in JSON lines.

The peers' scripts are in the repository's benchmarks/peers, not in an installed package. They know
nothing of this one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.errors import InputError
from foretoken.lab.bench.race import Key, Run, Task, Unable
from foretoken.lab.machine import cores

REPOSITORY = Path(__file__).resolve().parents[4]  # where the package is not installed
SCRIPTS = {
    "transformers": "peer_transformers.py",
    "openvino-genai": "peer_openvino_genai.py",
    "llama.cpp": "peer_llama_cpp.py",
}
ALONE = {"llama.cpp"}  # our loop there holds one text
OWN_VENV = {"transformers"}  # run in the project's own venv


class Peer:
    """A running peer, a context manager. `about`: its version, precisions, and a note if any."""

    def __init__(
        self,
        name: str,
        target: str,
        draft: str | None,
        dtype: str,
        draft_dtype: str | None,
        *,
        batched: bool = False,
    ) -> None:
        """Start it and load the pair; draft None: for plain decoding only. `batched`: for several
        texts at once.

        Raises InputError where the peer is not installed, Unable where it cannot run the pair.
        """
        self.name = name
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            command(name),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,  # Ctrl-C is ours
        )
        try:
            self.about = self._ask(
                target=str(Path(target).resolve()),
                draft=draft and str(Path(draft).resolve()),
                dtype=dtype,
                draft_dtype=draft_dtype or dtype,
                batched=batched,
                threads=cores(),
                python=sys.executable,
            )
        except BaseException:
            self.close()
            raise

    def run(self, tasks: list[Task], gamma: int) -> list[Run]:
        """Tasks alike but for prompts and seeds, with gamma guesses a step; 0: plain. They are done
        at once, where this peer can. Raises Unable where it cannot."""
        first = tasks[0]
        replies = self._ask(
            prompts=[task.prompt for task in tasks],
            max_new_tokens=first.tokens,
            gamma=gamma,
            temperature=first.params.temperature,
            top_k=first.params.top_k,
            top_p=first.params.top_p,
            seeds=[task.seed for task in tasks],
        )["texts"]
        for reply in replies:
            if len(reply["tokens"]) != first.tokens:
                raise Unable(f"it made {len(reply['tokens'])} tokens, not {first.tokens}")
        return [Run(**reply) for reply in replies]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise Unable(f"it ended: {self._last_error()}")
        try:
            reply = json.loads(line)
        except ValueError:
            raise Unable(f"its answer is no JSON: {line.strip()[:200]}") from None
        if "error" in reply:
            raise Unable(str(reply["error"]))
        return reply

    def _last_error(self) -> str:
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return lines[-1][:200] if lines else "without a word"


@dataclass(frozen=True, slots=True)
class Guest:
    """A peer with one gamma, as a contestant: all texts of a turn in one request."""

    peer: Peer
    gamma: int

    @property
    def key(self) -> Key:
        return (self.peer.name, self.gamma)

    def turn(self, tasks: list[Task]) -> list[Run]:
        return self.peer.run(tasks, self.gamma)


def command(name: str) -> list[str]:
    """The command that starts a peer; InputError with the remedy where it is not installed."""
    if name not in SCRIPTS:
        raise InputError(f"--vs is {name!r:.60}; give one of {', '.join(SCRIPTS)}")
    script = REPOSITORY / "benchmarks" / "peers" / SCRIPTS[name]
    if not script.exists():
        raise InputError(
            f"--vs {name} needs a checkout of the repository, installed with pip install -e: "
            "the peers are no part of the package"
        )
    if name in OWN_VENV:
        return [sys.executable, str(script)]
    home = REPOSITORY / ".peers" / name
    if not (home / "ready").exists():
        raise InputError(
            f"--vs {name} has no venv; make it with: python benchmarks/peers/make.py {name}"
        )
    return [str(home / "bin" / "python"), str(script)]
