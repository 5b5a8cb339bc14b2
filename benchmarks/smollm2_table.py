"""The table of README: SmolLM2-135M-Instruct plain, with each draft, and by other libraries, greedy
and at T = 0.7, as tokens a second and time to the first token.

Each line of figures is of one run of `race.py`, whose contestants take turns. Peers read a
folder, so the target is one with the GGUF file's values (`python benchmarks/smollm2_draft.py folder
--target smollm2 --out FOLDER`). Run it on an idle machine; a run that is there already is not
repeated.

    python benchmarks/smollm2_table.py FOLDER --dtype int8
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROMPTS = ROOT / "reproduction/recipes/prompts/chats.jsonl"
RESULTS = ROOT / "benchmarks/results"
DRAFTS = {
    "lookup": "look-up",
    "lookup+smollm2": "the draft that ships, behind a look-up",
}
# Plain and greedily, each with its own defaults, then otherwise
PEERS = {
    0.0: (
        "llama.cpp",
        "llama.cpp:q4_0",
        "llama.cpp:lookup",
        "llama.cpp:same-precision",
        "openvino-genai",
        "openvino-genai:same-precision",
        "onnxruntime-genai",
    ),
    0.7: (),
}
TEMPERATURES = (0.0, 0.7)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", help="a folder with the model")
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/smollm2-chats-DTYPE")
    arguments = parser.parse_args()
    out = arguments.out or RESULTS / f"smollm2-chats-{arguments.dtype}"
    runs = {
        (draft, T): _run(arguments, out / f"{draft.replace(':', '-')}-{T:g}", draft, T)
        for draft in DRAFTS
        for T in TEMPERATURES
    }
    # transformers has no weights of eight bits
    wide = [_run(arguments, out / f"float32-{T:g}", "none", T, "float32") for T in TEMPERATURES]
    print("| | greedy: tokens/s | first token | T = 0.7: tokens/s |\n|---|---|---|---|")
    first = next(iter(DRAFTS))
    plain = [_figures(runs[first, T], "foretoken", 0) for T in TEMPERATURES]
    print(_line("foretoken, plain", *plain))
    for draft, words in DRAFTS.items():
        # beside the plain decoding of its own run, as the machine's pace changes
        own = [_figures(runs[draft, T], "foretoken", None) for T in TEMPERATURES]
        bases = [_figures(runs[draft, T], "foretoken", 0)[0] for T in TEMPERATURES]
        print(_line(f"with {words}", *own, bases))
    for peer in PEERS[0.0]:
        print(_line(peer, _figures(runs[first, 0.0], peer, 0), None))
    print(_line("foretoken, plain, float32", *(_figures(run, "foretoken", 0) for run in wide)))
    print(_line("transformers, float32", *(_figures(run, "transformers", 0) for run in wide)))


def _run(
    arguments: Any, folder: Path, draft: str, temperature: float, dtype: str | None = None
) -> dict[str, Any]:
    """The document of a bench, made where it is not there; the first draft's has the peers."""
    if not (folder / "bench.json").exists():
        command = [sys.executable, str(ROOT / "benchmarks/race.py")]
        command += ["--target", arguments.target]
        command += ["--draft", draft, "--dtype", dtype or arguments.dtype]
        command += ["--prompts", str(_prompts(arguments.target, folder.parent))]
        command += ["--temperature", str(temperature), "--out", str(folder)]
        command += ["--gamma", "0" if dtype else "2", "--max-new-tokens", "64"]
        peers = PEERS[temperature] if draft == next(iter(DRAFTS)) else ()
        peers = ("transformers",) if dtype else peers
        command += [word for peer in peers for word in ("--vs", peer)]
        subprocess.run(command, check=True)
    return json.loads((folder / "bench.json").read_text())


def _prompts(target: str, folder: Path) -> Path:
    """A file with the chats as the target's own template has them, as ids."""
    from transformers import AutoTokenizer  # late: takes seconds

    file = folder / "prompts.jsonl"
    tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=False)
    chats = [json.loads(line)["messages"] for line in PROMPTS.read_text().splitlines()]
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    ids = [tokenizer.apply_chat_template(chat, **options) for chat in chats]
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in ids))
    return file


def _figures(document: dict[str, Any], name: str, gamma: int | None) -> tuple[float, float] | None:
    """Tokens a second, and seconds to the first; None where it did not run."""
    for figure in document["figures"]:
        if figure["name"] == name and figure["gamma"] == gamma:
            return figure["tokens_per_second"]["median"], figure["first_seconds"]["median"]
    return None


def _line(words: str, greedy: Any, sampled: Any, bases: Any = (None, None)) -> str:
    cells = [
        "" if each is None else f"{each[0]:.0f}" + (f" ({each[0] / base:.2f}x)" if base else "")
        for each, base in zip((greedy, sampled), bases, strict=True)
    ]
    waited = "" if greedy is None else f"{greedy[1]:.2f} s"
    return f"| {words} | {cells[0]} | {waited} | {cells[1]} |"


if __name__ == "__main__":
    main()
