"""Clients that others wrote, unchanged, against `foretoken serve`, each in an environment of its
own with the versions of versions.txt: `make clients`, or `make clients CLIENTS="openai llm"`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
REPO = HERE.parent.parent
BUILD = REPO / "build" / "clients"
# Two clients write ids themselves; those of the small pair are ids of a larger vocabulary, too
TOKENIZER = REPO / "src" / "foretoken" / "assets" / "target"
CHAT_MODEL = "SMOLLM2"  # names SmolLM2-135M-Instruct: a folder or a GGUF file
OFFLINE = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
PATIENCE = 300.0  # seconds, for a server to load and for a client to be done


def versions() -> dict[str, list[str]]:
    """Return the packages of each client."""
    lines = (HERE / "versions.txt").read_text().splitlines()
    pairs = [line.partition(":") for line in lines if line and not line.startswith("#")]
    return {name: packages.split() for name, _, packages in pairs}


def environment(name: str, packages: list[str]) -> Path:
    """The Python of a client's environment, made where it is missing or has other versions."""
    folder = BUILD / name
    python, made = folder / "bin" / "python", folder / "made.txt"
    wanted = f"{sys.version} {packages}"
    if not made.exists() or made.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        if packages:
            subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        made.write_text(wanted)
    return python


@contextmanager
def server(*options: str, name: str) -> Iterator[str]:
    """The address of a server, once it takes requests. Its log lies in the build folder."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "foretoken", "serve", "--port", str(port), *options]
    command += ["--served-model-name", name]
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE
    with (BUILD / f"{name}.log").open("w") as log:
        running = subprocess.Popen(command, stderr=log, stdout=log)
        try:
            while not ready(url):
                assert running.poll() is None and time.monotonic() < end, f"see {log.name}"
                time.sleep(0.2)
            yield url
        finally:
            running.terminate()
            running.wait(60)


def ready(url: str) -> bool:
    try:
        return urllib.request.urlopen(f"{url}/ready").status == 200
    except urllib.error.URLError:
        return False


def passes(python: Path, client: str, url: str, model: str) -> bool:
    """Run a client's script, which prints a line where all is well."""
    place = {"FORETOKEN_URL": url, "FORETOKEN_MODEL": model}
    place["FORETOKEN_TOKENIZER"] = str(TOKENIZER)
    mine = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    keys = {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": f"{url}/v1", **OFFLINE}
    command = [python, "-W", "ignore", HERE / f"with_{client}.py"]
    try:
        done = subprocess.run(
            command, env=mine | place | keys, capture_output=True, text=True, timeout=PATIENCE
        )
        good, told = done.returncode == 0, done.stdout if done.returncode == 0 else done.stderr
    except subprocess.TimeoutExpired:
        good, told = False, f"not done after {PATIENCE:.0f} s"
    lines = told.strip().splitlines()
    shown = lines[-1:] if good else lines[-25:]
    print(f"{'ok  ' if good else 'FAIL'} {model} {client}:", "\n".join(shown), flush=True)
    return good


def main(wanted: list[str]) -> int:
    BUILD.mkdir(parents=True, exist_ok=True)
    known = versions()
    if unknown := set(wanted) - known.keys():
        sys.exit(f"there is no client {', '.join(sorted(unknown))}; they are {', '.join(known)}")
    clients = {name: known[name] for name in wanted or known}
    pythons = {name: environment(name, packages) for name, packages in clients.items()}
    servers = {"pair": ["--chat-template", str(HERE / "template.jinja")]}
    if chat := os.environ.get(CHAT_MODEL):
        servers["smollm2"] = [chat, "--draft", "smollm2"]
    else:
        print(f"{CHAT_MODEL} names no SmolLM2-135M-Instruct: the pair that ships alone is tried")
    failed: list[str] = []
    for model, options in servers.items():
        with server(*options, name=model) as url:
            for client, python in pythons.items():
                if not passes(python, client, url, model):
                    failed.append(f"{client} with {model}")
    print(f"failed: {', '.join(failed)}" if failed else "all clients pass")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
