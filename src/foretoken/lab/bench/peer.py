"""Another library on the same pair: a process of its own, spoken to in JSON lines.

What the peers are and how they are driven stands in the repository's benchmarks/peers; an installed
package has none. A peer knows nothing of ours.
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
OWN_VENV = {"transformers"}  # those that run in the project's own


class Peer:
    """A running peer; use it in a `with`. `about`: its version, and the precision of what."""

    def __init__(
        self, name: str, target: str, draft: str | None, dtype: str, draft_dtype: str | None
    ) -> None:
        """Load the pair in it; draft None: for plain decoding only.

        Raises InputError where the peer is not there, Unable where it cannot run the pair.
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
                threads=cores(),
                python=sys.executable,
            )
        except BaseException:
            self.close()
            raise

    def run(self, task: Task, gamma: int) -> Run:
        """One task with that many guesses a step; 0: plain. Raises Unable where it cannot."""
        found = self._ask(
            prompt=task.prompt,
            max_new_tokens=task.tokens,
            gamma=gamma,
            temperature=task.params.temperature,
            top_k=task.params.top_k,
            top_p=task.params.top_p,
            seed=task.seed,
        )
        if len(found["tokens"]) != task.tokens:
            raise Unable(f"it made {len(found['tokens'])} tokens, not {task.tokens}")
        return Run(**found)

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
            raise Unable(f"it ended: {self._last_words()}")
        try:
            reply = json.loads(line)
        except ValueError:
            raise Unable(f"its answer is no JSON: {line.strip()[:200]}") from None
        if "error" in reply:
            raise Unable(str(reply["error"]))
        return reply

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return lines[-1][:200] if lines else "without a word"


@dataclass(frozen=True, slots=True)
class Guest:
    """A peer with one gamma, as a contestant."""

    peer: Peer
    gamma: int

    @property
    def key(self) -> Key:
        return (self.peer.name, self.gamma)

    def run(self, task: Task) -> Run:
        return self.peer.run(task, self.gamma)


def command(name: str) -> list[str]:
    """What starts a peer; InputError with the remedy where that is not there."""
    if name not in SCRIPTS:
        raise InputError(f"--vs is {name!r:.60}; give one of {', '.join(SCRIPTS)}")
    script = REPOSITORY / "benchmarks" / "peers" / SCRIPTS[name]
    if not script.exists():
        raise InputError(
            f"--vs {name} needs a checkout of the repository, installed with pip install -e: "
            "the peers are no part of the package"
        )
    home = REPOSITORY / ".peers" / name
    if name in OWN_VENV:
        return [sys.executable, str(script)]
    if not (home / "ready").exists():
        raise InputError(
            f"--vs {name} has no venv; make it with: python benchmarks/peers/make.py {name}"
        )
    return [str(home / "bin" / "python"), str(script)]
