"""The same load on servers of the same model on this CPU, in turn: ours with its draft,
`transformers serve --continuous-batching`, and OpenVINO GenAI's batching behind a minimal loop.

Greedy texts of one length, so that every server writes as many tokens; while one is measured the
others stand still. Expected: at 1, 4 and 16 requests at a time more tokens a second than
transformers, and less until the first token and the end, at the median and at the 99th percentile.
GenAI is reported only: it has no server that pip installs.

    python benchmarks/serving_peers.py [--target T --draft D] --transformers VENV [--genai VENV]

VENV: for transformers one that holds 'transformers[serving]', for GenAI .peers/openvino-genai
(peers/make.py). A target without a tokenizer is given one of made-up words.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import distributions
from importlib.resources import files
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from foretoken.cli.load import Load, Server, server
from foretoken.lab.load.arrivals import prompts
from foretoken.lab.load.figures import figures
from machine import save
from server_process import Process, foretoken, started

LOADS = {1: 8, 4: 16, 16: 48}  # requests at a time: requests
ROUNDS, PROMPT, NEW = 5, 64, 64
SHIPPED = files("foretoken") / "assets" / "target"
GENAI = Path(__file__).parent / "peers" / "serve_openvino_genai.py"
FIGURES = ("output_throughput", *(f"p{p}_{name}_ms" for name in ("ttft", "e2el") for p in (50, 99)))


@dataclass(frozen=True, slots=True)
class Peer:
    """A server that runs, what it is sent beside the prompt, and whether it reads ids."""

    process: Process
    server: Server
    wishes: dict[str, Any]
    ids: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", help="left out: the pair that ships")
    parser.add_argument("--draft")
    parser.add_argument("--transformers", required=True, type=Path, help="its venv")
    parser.add_argument("--genai", type=Path, help="its venv; left out: not measured")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--new", type=int, default=NEW, help="tokens of a text")
    arguments = parser.parse_args()
    with ExitStack() as running:
        folder = running.enter_context(spelled(Path(arguments.target or str(SHIPPED))))
        peers = begun(running, folder, arguments)
        # the first warms up
        rounds = [
            measured(peers, folder, arguments.new, number) for number in range(1 + arguments.rounds)
        ]
    loads = {str(at_once): summary([one[at_once] for one in rounds[1:]]) for at_once in LOADS}
    shape = {"requests": LOADS, "prompt": PROMPT, "new": arguments.new, "dtype": "float32"}
    head = {"command": " ".join(sys.argv), "versions": versions(arguments)}
    name = "default-pair" if arguments.target is None else "pair"
    print(save(f"serving-peers-{name}", head | shape | {"at_once": loads}))


@contextmanager
def spelled(target: Path) -> Generator[Path]:
    """The model's folder, or where it has no tokenizer a copy with one: word `t7` is id 7."""
    if (target / "tokenizer.json").exists():
        yield target
        return
    with TemporaryDirectory() as place:
        folder = Path(place) / "target"
        folder.mkdir()
        for file in target.resolve().iterdir():
            (folder / file.name).symlink_to(file)
        V = AutoConfig.from_pretrained(target, trust_remote_code=False).vocab_size
        tokenizer = Tokenizer(WordLevel({f"t{i}": i for i in range(V)}, unk_token="t0"))
        tokenizer.pre_tokenizer = WhitespaceSplit()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
        yield folder


def begun(running: ExitStack, folder: Path, arguments: argparse.Namespace) -> dict[str, Peer]:
    """All servers, by name."""
    pair = (str(folder), arguments.draft) if arguments.target else (None, None)
    own_process = running.enter_context(started(foretoken(*pair, "float32")))
    greedy = {"max_tokens": arguments.new, "temperature": 0.0}
    peers = {
        "foretoken": Peer(
            own_process,
            server(own_process.url, None, None),
            greedy | {"ignore_eos": True},
            ids=False,
        )
    }
    cache = running.enter_context(TemporaryDirectory())
    process = running.enter_context(
        started(transformers(arguments.transformers, folder), "/health", {"HF_HUB_CACHE": cache})
    )
    # it has no ignore_eos, but takes a generation config
    endless = json.dumps({"eos_token_id": -1, "do_sample": False})
    service = Server(process.url, None, str(folder), tells_ids=False, facts={})
    peers["transformers"] = Peer(
        process, service, greedy | {"generation_config": endless}, ids=False
    )
    if arguments.genai is not None:
        command = [str(arguments.genai / "bin/python"), str(GENAI), str(folder), sys.executable]
        loop = running.enter_context(started(command))
        service = Server(loop.url, None, "genai", tells_ids=True, facts={})
        peers["openvino-genai"] = Peer(loop, service, greedy, ids=True)
    return peers


def transformers(venv: Path, folder: Path) -> list[str]:
    """Its continuous batching on a CPU: attention is torch's own, as flash attention needs a GPU,
    and its cache takes a share of the memory rather than nine tenths."""
    command = [str(venv / "bin/transformers"), "serve", str(folder), "--continuous-batching"]
    command += ["--device", "cpu", "--dtype", "float32", "--attn-implementation", "sdpa"]
    return [*command, "--cb-max-memory-percent", "0.2", "--port"]


def measured(
    peers: dict[str, Peer], folder: Path, new: int, seed: int
) -> dict[int, dict[str, dict[str, float]]]:
    """A round: every load on every server, by requests at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    rows: dict[int, dict[str, dict[str, float]]] = {}
    for at_once, count in LOADS.items():
        ids = islice(prompts(PROMPT, len(tokenizer), 1000 * seed + at_once), 1 + count)
        texts = [tokenizer.decode(each) for each in ids]
        order = list(peers) if seed % 2 else list(reversed(peers))
        rows[at_once] = {}
        for name in order:
            peer = peers[name]
            inputs = [tokenizer(text).input_ids for text in texts] if peer.ids else texts
            with peer.process.alone([other.process for other in peers.values()]):
                rows[at_once][name] = rates(peer, inputs, at_once, new)
        print(at_once, rows[at_once], file=sys.stderr)
    return rows


def rates(peer: Peer, inputs: Sequence[Any], at_once: int, new: int) -> dict[str, float]:
    """Of one load. RuntimeError where a request fails or has another length."""
    load = Load(peer.server, inputs, peer.wishes, 0)
    seconds = load.run([0.0] * (len(inputs) - 1), at_once, lambda trace: None)
    bad = [trace.failure or trace.tokens for trace in load.traces if trace.tokens != new]
    if bad:
        raise RuntimeError(f"{len(bad)} requests failed, the first by {bad[0]}")
    document = figures(load.traces, seconds, ("ttft", "e2el"), (50, 99), {}).document
    return {name: document[name] for name in FIGURES}


def summary(rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians of the rounds, and how far ours is ahead of each: above 1 is better."""
    document: dict[str, Any] = {
        name: {figure: median(one[name][figure] for one in rounds) for figure in FIGURES}
        for name in rounds[0]
    }
    for name in [name for name in document if name != "foretoken"]:
        document[name]["ours_ahead"] = {
            figure: median(ahead(figure, one["foretoken"], one[name]) for one in rounds)
            for figure in FIGURES
        }
    return document | {"rounds": list(rounds)}


def ahead(figure: str, ours: dict[str, float], theirs: dict[str, float]) -> float:
    rate = ours[figure] / theirs[figure]
    return rate if figure == "output_throughput" else 1 / rate


def versions(arguments: argparse.Namespace) -> dict[str, str]:
    """Of the peers' packages."""
    venvs = [venv for venv in (arguments.transformers, arguments.genai) if venv]
    places = [place for venv in venvs for place in venv.glob("lib/python*/site-packages")]
    return {
        package.name: package.version
        for package in distributions(path=[str(place) for place in places])
        if package.name in ("transformers", "torch", "openvino-genai")
    }


if __name__ == "__main__":
    main()
