"""Bad requests, thousands of them: bodies that are cut, mutated and of wrong types, lengths that do
not hold, connections that break off before, within and behind a request, readers that are slow,
functions whose schemas are deep, huge, refer to themselves or cannot be satisfied.

Expected: no status 500 and no request without an answer that waits for one; the engine is the same
throughout; behind it no row is left and no file stays open (but those of the process that tries
grammars). The resident memory of both processes
is flat: in the last third of the cases its peak is at most 5 % and 16 MB above that of the second
third, the first one being the warm-up. Exit code 1 where that does not hold. Every case is drawn
from (seed, its number).

    python benchmarks/abuse.py TARGET --draft DRAFT --cases 20000 --seed 1    # into results/
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from machine import save

AT_ONCE = 24  # connections
SAMPLES = 60  # of memory
PATIENCE = 60.0  # seconds for an answer
GROWTH, SPARE = 1.05, 16 * 2**20
HELLO = [{"role": "user", "content": "Hello"}]
SMALL = {"max_tokens": 6, "temperature": 1.0}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
CALLS = {"messages": HELLO, **SMALL, "max_tokens": 60, "tools": [TOOL], "tool_choice": "required"}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "It was", **SMALL, "logprobs": 2, "seed": 3}),
    ("/v1/completions", {"prompt": ["It", "She"], "n": 2, **SMALL, "stream": True}),
    ("/v1/completions", {"prompt": [5, 6, 7], **SMALL, "logit_bias": {"5": -2}, "stop": ["a"]}),
    ("/v1/completions", {"prompt": "a", **SMALL, "structured_outputs": {"regex": "[ab]{1,5}"}}),
    ("/v1/chat/completions", {"messages": HELLO, **SMALL, "top_logprobs": 2, "logprobs": True}),
    ("/v1/chat/completions", {"messages": HELLO, **SMALL, "stream": True, "top_p": 0.5}),
    ("/v1/chat/completions", {"messages": HELLO, **SMALL, "response_format": FORMAT}),
    ("/v1/chat/completions", {**CALLS, "stream": True, "parallel_tool_calls": False}),
    ("/v1/chat/completions", {**CALLS, "tool_choice": "auto", "max_tokens": 6}),
    ("/v1/responses", {"input": "Hello", "max_output_tokens": 6, "stream": True}),
    ("/tokenize", {"prompt": "It was", "return_token_strs": True}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
]
LONG = {"prompt": "It", "max_tokens": 300, "ignore_eos": True, "stream": True, "logprobs": 5}
ODD: list[Any] = [None, True, -1, 0, 2**70, 1e308, -0.5, "", "\x00", "é" * 99, [], {}, [[]], [{}]]
ODD += [{"a": {"b": []}}, "0", [None], ["a", 1], "a" * 5000, list(range(999)), {"": ""}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--draft", default="none")
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "foretoken", "serve", arguments.target]
    command += ["--draft", arguments.draft, "--runtime", arguments.runtime]
    # kept prefixes take up to 1 GB, as documented, behind which a leak would not be seen
    command += ["--port", str(port), "--log-level", "warning", "--no-prefix-cache"]
    server = subprocess.Popen(command)
    try:
        until(lambda: told(port, "/ready") is not None, 600)
        result = asyncio.run(Abuse(port, server.pid, arguments.seed).run(arguments.cases))
    finally:
        server.terminate()
        code = server.wait(120)
    names = [Path(word).name for word in sys.argv]  # not where they lie
    result |= {"command": " ".join(names), "seed": arguments.seed, "exit_code": code}
    result["failures"] += [f"the server ended with {code}"] if code else []
    print(save("abuse", result))
    print(json.dumps({name: result[name] for name in ("outcomes", "memory", "failures")}, indent=1))
    sys.exit(bool(result["failures"]))


class Abuse:
    """Of a server on a port of this machine."""

    def __init__(self, port: int, pid: int, seed: int) -> None:
        self.port, self.seed = port, seed
        self.engine = json.loads(told(port, "/health") or "{}")["engine"]
        self.pids = {"server": pid, "engine": self.engine}
        self.outcomes: dict[str, Counter[str]] = {}
        self.failures: list[str] = []
        self.memory: dict[str, list[int]] = {name: [] for name in self.pids}

    async def run(self, cases: int) -> dict[str, Any]:
        """What came of them."""
        opened = {name: files(pid) for name, pid in self.pids.items()}
        start_time, room = time.monotonic(), asyncio.Semaphore(AT_ONCE)
        for start in range(0, cases, -(-cases // SAMPLES)):
            numbers = range(start, min(cases, start + -(-cases // SAMPLES)))
            await asyncio.gather(*(self.case(i, room) for i in numbers))
            for name, pid in self.pids.items():
                self.memory[name].append(resident(pid))
            print(f"{numbers.stop} cases, {time.monotonic() - start_time:.0f} s", file=sys.stderr)
        await asyncio.to_thread(self.settle, opened)
        return {
            "cases": cases,
            "seconds": round(time.monotonic() - start_time, 1),
            "outcomes": {kind: dict(counts) for kind, counts in sorted(self.outcomes.items())},
            "memory": self.memory,
            "failures": self.failures,
        }

    async def case(self, number: int, room: asyncio.Semaphore) -> None:
        rng = Random(f"{self.seed}/{number}")
        (kind,) = rng.choices(list(KINDS), [weight for _, weight in KINDS.values()])
        async with room:
            try:
                async with asyncio.timeout(PATIENCE):
                    outcome = await KINDS[kind][0](self.port, rng)
            except TimeoutError:
                outcome = "no answer"
        self.outcomes.setdefault(kind, Counter())[outcome] += 1
        if outcome in ("no answer", "500", "503", "refused"):
            self.failures.append(f"case {number}, {kind}: {outcome}")

    def settle(self, opened: dict[str, int]) -> None:
        """What must hold behind it all."""
        state: Any = None

        def free() -> bool:
            nonlocal state
            text = told(self.port, "/metrics") or ""
            unfinished = re.findall(
                r"^foretoken_num_requests_(?:running|waiting){.*} (.*)$", text, re.M
            )
            now = {name: files(pid) for name, pid in self.pids.items()}
            state = unfinished, opened, now
            return unfinished == ["0.0"] * 2 and all(now[name] <= opened[name] + 4 for name in now)

        try:
            until(free, 90)
        except TimeoutError:
            self.failures.append(f"rows or files are left: {state}")
        if json.loads(told(self.port, "/health") or "{}").get("engine") != self.engine:
            self.failures.append("the engine is another one")
        for name, sizes in self.memory.items():
            second, last = sizes[len(sizes) // 3 : -(len(sizes) // 3)], sizes[-(len(sizes) // 3) :]
            if second and max(last) > GROWTH * max(second) + SPARE:
                self.failures.append(f"the {name} grows: {max(second)} to {max(last)} bytes")


def valid(rng: Random) -> tuple[str, bytes]:
    path, body = rng.choice(BODIES)
    return path, json.dumps(body).encode()


def head(path: str, length: int | str, *more: str) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: a",
        "Content-Type: application/json",
        f"Content-Length: {length}",
        *more,
        "",
        "",
    ]
    return "\r\n".join(lines).encode()


async def cut(port: int, rng: Random) -> str:
    path, body = valid(rng)
    body = body[: rng.randrange(len(body))]
    return await sent(port, head(path, len(body)) + body)


async def typed(port: int, rng: Random) -> str:
    """One field or more of another type or beyond its bounds."""
    path, body = rng.choice(BODIES)
    fields = [*body, "n", "seed", "stop", "speculation", "structured_outputs", "tools", "priority"]
    changed = body | {rng.choice(fields): rng.choice(ODD) for _ in range(rng.randint(1, 3))}
    raw = json.dumps(changed).encode()
    return await sent(port, head(path, len(raw)) + raw)


async def mutated(port: int, rng: Random) -> str:
    path, body = valid(rng)
    raw = bytearray(body)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(raw))
        raw[at : at + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 2))
    return await sent(port, head(path, len(raw)) + bytes(raw))


DEEP = "a deep schema"  # its place in a body


async def schemas(port: int, rng: Random) -> str:
    """Functions that are hard to hold to, or cannot be."""
    opening, closing = '{"type": "object", "required": ["a"], "properties": {"a": ', "}}"
    levels = rng.choice([20, 200, 900, 20_000])  # more than Python's own encoder goes down
    deep = opening * levels + '{"type": "string"}' + closing * levels
    names = [f"name{i}" for i in range(rng.choice([300, 3000]))]
    hard: list[Any] = [
        DEEP,
        {"enum": names},
        {"type": "object", "properties": {name: {"type": "integer"} for name in names}},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1/x.json"}}},
        {"allOf": [{"anyOf": [{"required": [n]}, {"type": "object"}]} for n in names[:40]]},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a|a)*{999}b"}}},
        {"type": "object", "properties": {"a": {"type": "string", "minLength": 10**9}}},
        {"type": "object", "properties": {"a": {"type": "array", "minItems": 10**6}}},
        {"type": "object", "properties": {"a": {"type": "integer", "minimum": 9, "maximum": 1}}},
        {"type": "string"},
        False,
    ]
    function = {"name": rng.choice(["f", "", "a b", "é" * 99]), "parameters": rng.choice(hard)}
    choice = rng.choice(["required", "auto", {"type": "function", "function": {"name": "f"}}])
    changed = {"tools": [{"type": "function", "function": function}], "tool_choice": choice}
    body = json.dumps(CALLS | changed | {"stream": rng.random() < 0.5})
    raw = body.replace(json.dumps(DEEP), deep).encode()
    return await sent(port, head("/v1/chat/completions", len(raw)) + raw)


async def longer(port: int, rng: Random) -> str:
    """More is promised than comes; then the connection ends."""
    path, body = valid(rng)
    return await sent(port, head(path, len(body) + rng.randint(1, 999)) + body, end=True)


async def shorter(port: int, rng: Random) -> str:
    """What is left over is no request."""
    path, body = valid(rng)
    return await sent(port, head(path, rng.randrange(len(body))) + body)


async def headers(port: int, rng: Random) -> str:
    path, body = valid(rng)
    value = rng.choice(["-1", "1e3", "", "9" * 30, "5, 7", "é"])
    more = rng.choice(["Transfer-Encoding: chunked", "X: " + "a" * 70_000, "Expect: 5", ": ", "a"])
    length = rng.choice([value, len(body)])
    return await sent(port, head(path, length, more) + body, end=True)


async def noise(port: int, rng: Random) -> str:
    return await sent(port, rng.randbytes(rng.randint(1, 400)), end=True)


async def gone(port: int, rng: Random) -> str:
    """The connection ends within the request."""
    path, body = valid(rng)
    message = head(path, len(body)) + body
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(message[: rng.randrange(1, len(message))])
    with suppress(OSError):
        await writer.drain()
    writer.transport.abort()
    return "left"


async def torn(port: int, rng: Random) -> str:
    """The connection ends while a text is written."""
    return await _leave(port, rng, rng.randint(1, 2000), 0.0)


async def slow(port: int, rng: Random) -> str:
    return await _leave(port, rng, rng.randint(10, 60), 0.05)


async def _leave(port: int, rng: Random, count: int, pause: float) -> str:
    body = json.dumps(LONG | {"n": rng.randint(1, 4)}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    try:
        writer.write(head("/v1/completions", len(body)) + body)
        for _ in range(count):
            if not await reader.read(1):
                return "ended"
            await asyncio.sleep(pause)
    except OSError:
        return "reset"
    finally:
        writer.transport.abort()
    return "left"


async def sent(port: int, raw: bytes, *, end: bool = False) -> str:
    """The status of the answer. end: nothing more is sent, which the other side sees."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return "refused"
    try:
        writer.write(raw)
        if end:
            writer.write_eof()
        line = await reader.readline()
        status = line.split()[1].decode() if line.startswith(b"HTTP/1.1 ") else "no status"
        while not end and not (line == b"\r\n" or line == b""):  # its head, then some of its body
            line = await reader.readline()
        await reader.read(200)
        return status
    except OSError:
        return "reset"
    finally:
        writer.transport.abort()


KINDS = {
    "cut": (cut, 15),
    "typed": (typed, 25),
    "mutated": (mutated, 25),
    "schemas": (schemas, 4),
    "longer": (longer, 5),
    "shorter": (shorter, 5),
    "headers": (headers, 5),
    "noise": (noise, 5),
    "gone": (gone, 8),
    "torn": (torn, 6),
    "slow": (slow, 1),
}


def told(port: int, path: str) -> str | None:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.read().decode()
    except OSError:
        return None


def resident(pid: int) -> int:
    """Bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.split("VmRSS:")[1].split()[0])


def files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def until(good: Any, seconds: float) -> None:
    """TimeoutError where it never is."""
    end = time.monotonic() + seconds
    while not good():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.2)


if __name__ == "__main__":
    main()
