"""A file of prompts, whose command or whose workers on Ray are killed at any moment, and a disk
that fills: every line is there once, as in a run that nothing broke off."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tiny import byte_level, folder, llama

pytestmark = pytest.mark.prove  # every run is a process, which takes seconds to begin

MAIN = "from foretoken.cli import main; main()"
OPTIONS = ("--dtype", "float64", "--gamma", "2", "--temperature", "1", "--seed", "5")
COMMAND = (sys.executable, "-c", MAIN, "generate", "--runtime", "transformers")
SHAPE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SHAPE |= {"num_key_value_heads": 1, "intermediate_size": 16}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    base = tmp_path_factory.mktemp("pair")
    folder(base / "target", llama(eos_token_id=None, **SHAPE), byte_level())
    folder(base / "draft", llama(seed=1, **SHAPE), byte_level())
    return ("--target", str(base / "target"), "--draft", str(base / "draft"))


def prompts(path: Path, count: int) -> None:
    """Lines with options of their own, some of several texts, and a bad one."""
    rows = [
        {"prompt": [i % 300 + 1, 7], "id": f"n{i}", "max_new_tokens": 1 + i % 3}
        for i in range(count)
    ]
    rows[1] |= {"num_return_sequences": 3}
    rows[2] |= {"prompt": [999]}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def started(
    file: Path, out: Path, pair: tuple[str, ...], *options: str, **more: object
) -> subprocess.Popen[str]:
    files = ("--prompt-file", str(file), "--output", str(out))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*COMMAND, *files, *pair, *OPTIONS, *options],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,  # pyright: ignore
    )


def finished(file: Path, out: Path, pair: tuple[str, ...]) -> None:
    """One bad line makes the exit code 1."""
    process = started(file, out, pair)
    _, err = process.communicate(timeout=900)
    assert process.returncode == 1 and "line 3: prompt 0 holds the id 999" in err, err[-2000:]


def read(out: Path) -> dict[tuple[int, int], object]:
    """What follows from the seed, by line and copy, each of which is there once."""
    lines = [json.loads(line) for line in out.read_bytes().splitlines()]
    by_name = {(row["line"], row["copy"]): row for row in lines}
    assert len(by_name) == len(lines)
    fields = ("id", "tokens", "text", "finish_reason", "seed")
    return {name: [row[key] for key in fields] for name, row in by_name.items()}


def lines(out: Path) -> int:
    return out.read_bytes().count(b"\n") if out.exists() else 0


def killed(file: Path, out: Path, pair: tuple[str, ...], after: int, late: float) -> None:
    """SIGKILL so many seconds after so many lines are there; the command may have ended before."""
    process = started(file, out, pair)
    until = time.monotonic() + 600
    while lines(out) < after and process.poll() is None and time.monotonic() < until:
        time.sleep(0.002)
    time.sleep(late)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def broken_off(tmp_path: Path, pair: tuple[str, ...], count: int, kills: int) -> list[int]:
    """How many lines each kill left; all is checked."""
    chance, file = random.Random(count), tmp_path / "in.jsonl"
    prompts(file, count)
    whole, out, sizes = tmp_path / "whole.jsonl", tmp_path / "out.jsonl", list[int]()
    for kill in range(kills):
        after = count * kill // (kills + 1) + chance.randrange(count // (2 * kills))
        killed(file, out, pair, after, 0.05 * chance.random())
        sizes.append(lines(out))
    finished(file, out, pair)
    finished(file, whole, pair)
    texts = read(whole)
    assert len(texts) == count + 1  # two texts more, one line less
    assert read(out) == texts
    assert sizes == sorted(sizes)
    return sizes


def test_proof_five_thousand_lines_killed_five_times(tmp_path: Path, pair: tuple[str, ...]) -> None:
    sizes = broken_off(tmp_path, pair, 5000, 5)
    print(f"5000 lines, killed at {sizes}")
    assert len(set(sizes)) > 3


RAY = ("--ray", "local", "--replicas", "2", "--threads", "1")
WORKER = b"ray::MapWorker"


def workers(process: int) -> Iterator[int]:
    """Processes of Ray Data that write texts for this one now."""
    with suppress(OSError):  # one that has ended
        for task in Path(f"/proc/{process}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                if Path(f"/proc/{child}/cmdline").read_bytes().startswith(WORKER):
                    yield child
                yield from workers(child)


def test_proof_two_thousand_lines_on_ray_whose_workers_and_driver_are_killed(
    tmp_path: Path, pair: tuple[str, ...]
) -> None:
    """At each tenth of the lines a worker is killed, at random which, and at six tenths the driver;
    the same command goes on, and its workers are killed too."""
    pytest.importorskip("ray", reason="ray is not installed")
    count, chance, deaths = 2000, random.Random(3), list[int]()
    file, whole, out = (tmp_path / name for name in ("in.jsonl", "whole.jsonl", "out.jsonl"))
    prompts(file, count)
    finished(file, whole, pair)

    def run(marks: list[int]) -> subprocess.Popen[str]:
        process, end = started(file, out, pair, *RAY), time.monotonic() + 1200
        for mark in marks:
            while lines(out) < mark and process.poll() is None and time.monotonic() < end:
                time.sleep(0.02)
            alive = [*workers(process.pid)]
            if process.poll() is None and alive:
                os.kill(chance.choice(alive), signal.SIGKILL)
                deaths.append(lines(out))
        return process

    process = run([1, *range(200, 1200, 200)])
    while lines(out) < 1200 and process.poll() is None:
        time.sleep(0.02)
    process.kill()
    process.communicate()
    rows = lines(out)
    assert 1200 <= rows < count
    process = run([rows + 1, *range(1400, count, 200)])
    _, err = process.communicate(timeout=1200)
    assert process.returncode == 1 and "line 3: prompt 0 holds the id 999" in err, err[-2000:]
    assert read(out) == read(whole) and len(deaths) >= 6
    print(f"{count} lines on Ray: workers killed at {deaths} lines, the driver at {rows}")


def test_proof_a_disk_that_fills(tmp_path: Path, pair: tuple[str, ...]) -> None:
    """What is there is whole, the error names the file, and the same command goes on from it."""
    file, out, whole = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "whole.jsonl"))
    prompts(file, 300)

    def small_disk() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    process = started(file, out, pair, preexec_fn=small_disk)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2 and f"error: {out} cannot be written: " in err, err[-2000:]
    content = out.read_bytes()
    assert 0 < len(content) <= 20_000 and content.endswith(b"\n") and read(out)
    finished(file, out, pair)
    assert out.read_bytes().startswith(content)
    finished(file, whole, pair)
    assert read(out) == read(whole)
