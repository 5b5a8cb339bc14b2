"""Judge every class of transformers, and write docs/families.md of it: `make families`.

It takes minutes, and continues where it was stopped. The page is a template and the results.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from textwrap import fill
from typing import Any

import psutil

from census import MAPS, census, classes
from foretoken.cli.render import track_progress
from foretoken.storage.cache import get_versions

ROOT = Path(__file__).parents[1]
RESULT, PAGE = ROOT / "benchmarks/results/families.json", ROOT / "docs/families.md"
UNFINISHED = ROOT / "build/families.json"
PROCESS_BYTES = 8_000_000_000  # that a class may take
# The most downloaded first, as of November 2026
POPULAR = """
Qwen2 Qwen3 Llama Gemma3 Gemma4 Qwen3_5 GptOss Mistral Phi3 Phi DeepseekV3 DeepseekV2 SmolLM3
Granite Olmo2 Olmo3 GPT2 Qwen2_5_VL Qwen3VL Gemma3n Gemma2 Qwen3Moe Qwen2Moe Mixtral Ministral3
Falcon Bloom OPT GPTNeoX GPTJ Llama4 Glm4Moe Glm4 Glm Lfm2 Cohere2 Cohere StableLm Starcoder2
Qwen3Next FalconH1 Bamba NemotronH Nemotron T5 MT5 UMT5 T5Gemma Bart MBart M2M100 NllbMoe Pegasus
Marian LongT5 LED Blenderbot Switch Kimi MiniMax HunYuan
""".split()
FORMS = {
    "transformers": "batches share passes",
    "transformers, row by row": "one row in a pass",
}
TITLES = {
    "refused": "Those that are refused",
    "no text": "Those that write no text",
    "no inputs": "Without known inputs",
}
NAME = re.compile(r"^[\w.-]+ \(\w+\) |; use transformers' own .*$")  # and the remedy
NATIVE = """Of those that run, those whose parts it knows: each passed the self-check, which
compares logits, and one that reads pictures or sounds gave the logits of its own `generate` behind
them. Their encoders run on torch. The table says what others have."""
HEAD = """# Which families run
Every class of transformers {transformers} that generates text, as a tiny random model of its
default configuration, on torch {torch}: greedy texts of a ragged batch of three at gamma 0, 1 and
4, with draft tokens of a look-up and of a model, against its own `generate`. Windows, chunks and
other lengths at which a family changes are 8 tokens in these models, and the texts are longer. A
class that reads pictures or sounds is given two prompts with one each, beside one of text where
`generate` takes that: small encoders, and inputs in the shapes that its processor makes
([images and speech](images-and-speech.md)); its text has to depend on them.
On a CPU the native decoder comes first where it serves a class, then torch:
`foretoken doctor MODEL` says how a model of yours runs. This page is made by `make families`, which
compares all classes on the versions that are installed.

- "Batches share passes": rows of different lengths in one forward pass, over a cache of ours.
- "One row in a pass": over transformers' own cache of each row; exact, but a batch gains nothing.
- Refused as scoring single tokens at most: code that takes blocks only at the start of a text, or
  whose texts depend on where the prompt ends; draft tokens would save no passes.
- "No text": codes of sounds, notes and the like, or all of a text at once.
- "No inputs": none that its `generate` takes are known here.

Batches share passes over states too, where these are windows of convolutions, or recurrences that a
family computes by a function of its own name. Other states are not ours to take back, and run one
row in a pass:

- MiniMax: lightning attention is a loop within its layers, over a class of cache that its forward
  insists on.
- RecurrentGemma: its layers themselves hold their states, and begin each block's convolution anew.
- RWKV, xLSTM: loops and kernels of their own, whose states are one for all layers.
- Zaya: it keeps the last token's values, of a block with its padding.
- Inkling: windows alone, but its attention counts from one length for all rows.
- Qwen4-exp, GLM5-next: recurrences as above, beside attention that also keeps an index of its
  tokens. DeepSeek-V4, Unlimited-OCR: attention over what they make of several tokens.
"""


def judge_all() -> dict[str, Any]:
    """Judge every class that an unfinished run with the same versions has not, in as many processes
    as there are processors and memory for; print a line for each as it comes."""
    done = _unfinished()
    names = sorted({*classes()} - {each["name"] for each in done})
    workers = min(psutil.cpu_count() or 1, psutil.virtual_memory().available // PROCESS_BYTES)
    for verdict in track_progress(census(names, max(1, workers)), "judging", len(names)):
        why = ", ".join(filter(None, [verdict.form, verdict.reason]))
        print(f"{verdict.name}: {verdict.outcome}{f' ({why})' if why else ''}", flush=True)
        done.append(asdict(verdict))
        _write(UNFINISHED, {"versions": get_versions(), "families": done})
    return {"versions": get_versions(), "families": done}


def _unfinished() -> list[dict[str, Any]]:
    """Return what an earlier run judged with the same versions, without failures: a busy machine
    may be why."""
    known = json.loads(UNFINISHED.read_text()) if UNFINISHED.exists() else {}
    same = known.get("versions") == get_versions()
    return [each for each in known["families"] if each["outcome"] != "failed"] if same else []


def _write(path: Path, document: dict[str, Any]) -> None:
    """Write a line for each class, in the order of their names."""
    lines = sorted(json.dumps(each) for each in document["families"])
    content = ",\n".join(lines)
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        f'{{"versions": {json.dumps(document["versions"])}, "families": [\n{content}\n]}}\n'
    )


def page(document: dict[str, Any]) -> str:
    """Return the page about these results."""
    families: list[dict[str, Any]] = sorted(document["families"], key=_rank)
    runs = [each for each in families if each["outcome"] == "equal"]
    lines = [HEAD.format(**document["versions"]), *_counts(families), "", "## Those that run"]
    for form, words in FORMS.items():
        names = [each["name"] for each in runs if each["form"] == form]
        if names:
            lines += ["", f"### {words[0].upper()}{words[1:]}", _listed(names)]
    lines += ["", "## On the native decoder", NATIVE, *_natively(families)]
    for outcome, title in TITLES.items():
        lines += ["", f"## {title}", "| class | reason |", "|---|---|"]
        lines += [_reason(each) for each in families if each["outcome"] == outcome]
    lines += ["", "## Not built", "Their default configuration makes no model here.", ""]
    lines += [_listed([each["name"] for each in families if each["outcome"] == "not built"])]
    return "\n".join(lines) + "\n"


def _natively(families: list[dict[str, Any]]) -> list[str]:
    """The classes that the native decoder serves, and a table of why it refuses others."""
    asked = [each for each in families if each["native"]]
    served = [each["name"] for each in asked if each["native"] == "equal"]
    reasons: dict[str, list[str]] = {}
    for each in asked:
        if each["native"] != "equal":
            inner = re.search(r"expects \((.*)\)", each["native"])
            reason = inner[1] if inner else NAME.sub("", each["native"])
            reasons.setdefault(reason, []).append(each["name"])
    table = ["", "| refused for | classes |", "|---|---|"]
    table += [f"| {reason} | {', '.join(names)} |" for reason, names in reasons.items()]
    return ["", _listed(served), *table]


def _listed(names: list[str]) -> str:
    return fill(", ".join(names), 120)


def _counts(families: list[dict[str, Any]]) -> list[str]:
    """A table of the outcomes by what the classes read, and the share of those that run."""
    head = ["read", *FORMS.values(), *TITLES, "not built", "native", "run of those possible"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for kind in MAPS:
        own = [each for each in families if each["kind"] == kind]
        forms = Counter(each["form"] for each in own if each["outcome"] == "equal")
        outcomes = Counter(each["outcome"] for each in own)
        possible = len(own) - outcomes["no text"] - outcomes["not built"]
        cells = [*(forms[form] for form in FORMS)]
        cells += [outcomes[name] for name in (*TITLES, "not built")]
        cells.append(sum(each["native"] == "equal" for each in own))
        share = f"{outcomes['equal'] / possible:.0%}" if possible else ""
        lines.append(f"| {' | '.join([kind, *map(str, cells), share])} |")
    return lines


def _reason(each: dict[str, Any]) -> str:
    return f"| {each['name']} | {NAME.sub('', each['reason'] or '')} |"


def _rank(each: dict[str, Any]) -> tuple[int, str]:
    at = [i for i, name in enumerate(POPULAR) if each["name"].startswith(name)]
    return min(at, default=len(POPULAR)), each["name"]


def main() -> None:
    """Judge all, and write the results and the page; exit code 1 where a class fails."""
    document = judge_all()
    _write(RESULT, document)
    PAGE.write_text(page(document))
    UNFINISHED.unlink()
    bad = [x["name"] for x in document["families"] if x["outcome"] in ("differs", "failed")]
    sys.exit(f"not as transformers writes, or failed: {', '.join(bad)}" if bad else 0)


if __name__ == "__main__":
    main()
