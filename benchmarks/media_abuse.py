"""Hostile pictures by the hundred, beside one stream: bombs of several formats, files that are cut
and mutated, thousands of pictures in a request, data URLs of 100 MB, addresses of files and of
private networks.

Expected: no status 500 or 503 and the same engine throughout; hostile pictures hold the stream up
no longer than good ones (`stalls`: median, 99th percentile and maximum of the seconds between its
events, beside nothing, good pictures, hostile ones and 100 MB); at the end a good picture is
answered as at the beginning. Exit code 1 where a status or an answer does not hold.

    python benchmarks/media_abuse.py TARGET --cases 600 --seed 1    # into results/
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import socket
import subprocess
import sys
import time
import zlib
from collections import Counter
from random import Random
from threading import Event
from typing import Any

import httpx2
import numpy as np
from PIL import Image

from abuse import resident, told, until
from machine import save

GOOD = Image.effect_noise((320, 240), 60).convert("RGB")
NEW = {"max_tokens": 6, "temperature": 0}
AT_ONCE = 4


def file(image: Image.Image, kind: str, **how: Any) -> bytes:
    image.save(held := io.BytesIO(), kind, **how)
    return held.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4) + name + data + zlib.crc32(name + data).to_bytes(4)


def png(width: int, height: int, rows: bytes, *more: bytes) -> bytes:
    """A PNG of one bit a pixel, whatever its rows hold."""
    head = chunk(b"IHDR", width.to_bytes(4) + height.to_bytes(4) + bytes([1, 0, 0, 0, 0]))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(more) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def bombs() -> list[bytes]:
    zeros = zlib.compress(bytes(200_000_000), 9)
    text = chunk(b"zTXt", b"a\0\0" + zeros)
    frames = [Image.new("P", (2000, 2000), i) for i in range(60)]
    return [
        png(40_000, 40_000, zeros),
        png(2**31 - 1, 2**31 - 1, zeros),
        png(6000, 6000, zeros),  # within the limit of pixels, and four times as much data
        png(64, 64, zlib.compress(bytes(64 * 9)), text),
        file(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        file(Image.new("L", (16_000, 16_000)), "WEBP", lossless=True),
        file(Image.new("1", (30_000, 30_000)), "TIFF", compression="group4"),
        b'<svg xmlns="http://www.w3.org/2000/svg" width="99999999" height="99999999"/>',
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) (r) file\n",
    ]


KINDS = [file(GOOD, kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "PPM")]
ADDRESSES = (
    "/etc/passwd file:///etc/passwd http://127.0.0.1/a http://169.254.169.254/latest ftp://a/b"
)


def hostile(rng: Random, made: list[bytes]) -> list[dict[str, Any]]:
    """The parts of a message."""
    kind = rng.choice(["bomb", "cut", "mutated", "noise", "many", "address", "url"])
    data = bytearray(rng.choice(KINDS))
    match kind:
        case "bomb":
            data = bytearray(rng.choice(made))
        case "cut":
            del data[rng.randrange(len(data)) :]
        case "mutated":
            for _ in range(rng.randint(1, 40)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        case "noise":
            data = bytearray(rng.randbytes(rng.randint(0, 5000)))
        case "many":
            return [picture("data:,")] * rng.choice([33, 10_000])
        case "address":
            return [picture(rng.choice(ADDRESSES.split()))]
        case _:
            return [picture(rng.choice(["", "data:", "data:;base64,", "data:image/png,abc", "\0"]))]
    return [picture(url(bytes(data)))]


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def picture(address: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address}}


async def ask(client: httpx2.AsyncClient, parts: list[dict[str, Any]]) -> httpx2.Response:
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]
    return await client.post("/v1/chat/completions", json={"messages": messages, **NEW})


def streamed(base: str, over: Event) -> list[float]:
    """The seconds between the events of a stream, one after another until it is over: in a thread,
    so that the work on requests here is not counted."""
    body = {"prompt": "It was", "max_tokens": 100, "ignore_eos": True, "stream": True}
    gaps: list[float] = []
    with httpx2.Client(base_url=base, timeout=120) as client:
        while not over.is_set():
            with client.stream("POST", "/v1/completions", json=body) as answer:
                last = time.perf_counter()
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        gaps.append(time.perf_counter() - last)
                        last = time.perf_counter()
    return gaps


async def beside(base: str, work: Any) -> tuple[list[float], Any]:
    """A stream's gaps while the work is done, and what that gives."""
    over = Event()
    stream = asyncio.create_task(asyncio.to_thread(streamed, base, over))
    try:
        made = await work
    finally:
        over.set()
    return await stream, made


async def run(port: int, cases: int, seed: int) -> dict[str, Any]:
    outcomes, failures = Counter[str](), list[str]()
    room, made = asyncio.Semaphore(AT_ONCE), bombs()
    base = f"http://127.0.0.1:{port}"
    async with httpx2.AsyncClient(base_url=base, timeout=120) as client:

        async def one(number: int) -> None:
            async with room:
                answer = await ask(client, hostile(Random(f"{seed}/{number}"), made))
            outcomes[str(answer.status_code)] += 1
            if answer.status_code >= 500:
                failures.append(f"case {number}: {answer.text[:200]}")

        async def all_of(count: int) -> None:
            await asyncio.gather(*(one(number) for number in range(count)))

        async def good(count: int) -> str:
            answers = [await ask(client, [picture(url(KINDS[0]))]) for _ in range(count)]
            texts = {answer.json()["choices"][0]["message"]["content"] for answer in answers}
            failures.extend(["good pictures are answered differently"] * (len(texts) > 1))
            return texts.pop()

        async def heavy() -> int:
            return (await ask(client, [picture(url(bytes(75_000_000)))])).status_code

        before = await good(1)
        alone, _ = await beside(base, asyncio.sleep(5))
        fine, _ = await beside(base, good(40))
        rough, _ = await beside(base, all_of(cases))
        large, status = await beside(base, heavy())
        outcomes[f"100 MB: {status}"] += 1
        failures += ["the answer to a good picture has changed"] * (await good(1) != before)
    parts = {"alone": alone, "good": fine, "hostile": rough, "100 MB": large}
    stalls = {n: [float(np.quantile(g, q)) for q in (0.5, 0.99, 1)] for n, g in parts.items()}
    return {"cases": cases, "outcomes": dict(outcomes), "stalls": stalls, "failures": failures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--cases", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "foretoken", "serve", arguments.target, "--draft", "lookup"]
    command += ["--runtime", "transformers", "--port", str(port), "--log-level", "warning"]
    server = subprocess.Popen(command)
    try:
        until(lambda: told(port, "/ready") is not None, 600)
        engine = json.loads(told(port, "/health") or "{}")["engine"]
        sizes = [resident(server.pid), resident(engine)]
        result = asyncio.run(run(port, arguments.cases, arguments.seed))
        result["memory"] = {"before": sizes, "behind": [resident(server.pid), resident(engine)]}
        if json.loads(told(port, "/health") or "{}").get("engine") != engine:
            result["failures"].append("the engine is another one")
    finally:
        server.terminate()
        server.wait(120)
    print(save("media-abuse", result | {"seed": arguments.seed}))
    print(json.dumps({name: result[name] for name in ("outcomes", "stalls", "failures")}, indent=1))
    sys.exit(bool(result["failures"]))


if __name__ == "__main__":
    main()
