"""The table of README: SmolLM2-135M-Instruct plain, with each draft, and by other libraries, greedy
and at T = 0.7, as tokens a second and time to the first token.

Each line of figures is of one run of `foretoken bench`, whose contestants take turns. Peers read a
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
PROMPTS = ROOT / "recipes/prompts/chats.jsonl"
RESULTS = ROOT / "benchmarks/results"
DRAFTS = {
    "lookup": "look-up",
    "self:int4": "itself in four bits",
    "smollm2": "the draft that ships",
}
PEERS = ("llama.cpp", "openvino-genai", "onnxruntime-genai", "transformers")
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
    print("| | greedy: tokens/s | first token | T = 0.7: tokens/s |\n|---|---|---|---|")
    first = next(iter(DRAFTS))
    plain = [_figures(runs[first, T], "foretoken", 0) for T in TEMPERATURES]
    print(_line("foretoken, plain", *plain))
    for draft, words in DRAFTS.items():
        # beside the plain decoding of its own run, as the machine's pace changes
        own = [_figures(runs[draft, T], "foretoken", None) for T in TEMPERATURES]
        bases = [_figures(runs[draft, T], "foretoken", 0)[0] for T in TEMPERATURES]
        print(_line(f"with {words}", *own, bases))
    for peer in PEERS:
        theirs = [_figures(runs[first, T], peer, 0) for T in TEMPERATURES]
        print(_line(peer, *theirs))


def _run(arguments: Any, folder: Path, draft: str, temperature: float) -> dict[str, Any]:
    """The document of a bench, made where it is not there; the first draft's has the peers."""
    if not (folder / "bench.json").exists():
        command = [sys.executable, "-m", "foretoken", "bench", "--target", arguments.target]
        command += ["--draft", draft, "--dtype", arguments.dtype, "--prompts", str(PROMPTS)]
        command += ["--temperature", str(temperature), "--gamma", "2", "--out", str(folder)]
        command += ["--max-new-tokens", "64"]
        peers = PEERS if draft == next(iter(DRAFTS)) else ()
        command += [word for peer in peers for word in ("--vs", peer)]
        subprocess.run(command, check=True)
    return json.loads((folder / "bench.json").read_text())


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
