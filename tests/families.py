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
    "refused": "Classes that are refused",
    "no text": "Classes that generate no text",
    "no inputs": "Classes without known inputs",
}
NAME = re.compile(r"^[\w.-]+ \(\w+\) |; use transformers' own .*$")  # and the remedy
PART = re.compile(r"^\S+ is not built as the native decoder expects \((.*)\)$")  # that it lacks
SPREAD = re.compile(r" by \S+ of their spread")  # of logits: in the results
KINDS = {"sounds": "audio", "pictures": "images"}
NATIVE = """The native decoder supports all parts of these classes. Each passed the self-check,
which compares logits. For classes that take images or audio, the logits after such inputs also
agreed with those in the class's own `generate`. Encoders of images and audio run on torch."""
TORCH = "The native decoder does not run these classes, for these reasons."
ROWS = """On torch, each sequence of these classes runs in separate forward passes. In all other
classes, sequences of a batch share forward passes."""
NOT_BUILT = "The default configuration of these classes builds no model in the test."
HEAD = """# Which families run
This page lists every class of transformers {transformers} that generates text, and whether it runs
on foretoken, as tested with torch {torch}. For each class, the test builds a tiny random model of
the class's default configuration. The model generates greedily for a batch of three prompts of
different lengths, at gamma (draft tokens per step) 0, 1 and 4, with draft tokens from look-up and
from a draft model. The output must equal the output of the class's own `generate`. Windows, chunks
and other lengths at which a family changes its computation are 8 tokens in these models, and the
sequences are longer.

A class that takes images or audio gets two prompts with one image or audio each and, if its
`generate` takes such prompts, one prompt of text only ([images and speech](images-and-speech.md)).
The test also checks that the output depends on these inputs.

On a CPU, foretoken uses the native decoder for a class if possible, else torch.
`foretoken doctor MODEL` prints the backend of your model. `make families` generates this page: it
tests all classes with the versions that are installed.

- "Batches share passes": sequences of different lengths run in one forward pass, with foretoken's
  own cache.
- "One row in a pass": each sequence runs in separate forward passes, with transformers' own cache.
  The output is exact, but a batch is not faster than single sequences.
- "Refused" because at most one token is scored per forward pass: the class's code takes several
  tokens only at the start of a sequence, or its output depends on where the prompt ends. Draft
  tokens would save no forward passes.
- "No text": the class generates codes of audio, notes and the like, or the whole text at once.
- "No inputs": the test knows no inputs that the class's `generate` takes.

Batches also share forward passes in models with recurrent states, if these states are windows of
convolutions, or recurrences that the family computes in a function of its own name. foretoken
cannot roll back other states, so these families run one row in a pass:

- MiniMax: lightning attention is a loop within the layers, and the model's forward requires a
  cache of its own class.
- RecurrentGemma: the layers themselves store their states, and restart the convolution at each
  block.
- RWKV, xLSTM: they use their own loops and kernels, and store the states of all layers together.
- Zaya: it stores the values of the last token of a block, padding included.
- Inkling: its only states are windows, but its attention uses one length for all rows.
- Qwen4-exp, GLM5-next: they have recurrences like those above, and also attention that stores an
  index of its tokens. DeepSeek-V4: its attention uses values that are computed from several tokens
  together.

The last column of the table is the share of classes that run among all classes except for "no
text" and "not built".
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
    native = [each["name"] for each in runs if each["native"] == "equal"]
    rows = [each["name"] for each in runs if each["form"] == "transformers, row by row"]
    lines = [HEAD.format(**document["versions"]), *_counts(families), "", "## Classes that run"]
    lines += ["", "### On the native decoder", NATIVE, "", _listed(native)]
    lines += ["", "### On torch", TORCH, "", *_reasons(runs, "native")]
    lines += ["", "### One row in a pass", ROWS, "", _listed(rows)]
    for outcome, title in TITLES.items():
        concerned = [each for each in families if each["outcome"] == outcome]
        lines += ["", f"## {title}", *_reasons(concerned, "reason")]
    lines += ["", "## Not built", NOT_BUILT, ""]
    lines += [_listed([each["name"] for each in families if each["outcome"] == "not built"])]
    return "\n".join(lines) + "\n"


def _reasons(families: list[dict[str, Any]], entry: str) -> list[str]:
    """A table of the reasons in that entry, each with its classes."""
    reasons: dict[str, list[str]] = {}
    for each in families:
        if each[entry] != "equal":
            reason = SPREAD.sub("", PART.sub(r"\1", NAME.sub("", each[entry])))
            reasons.setdefault(reason, []).append(each["name"])
    lines = [f"| {reason} | {', '.join(names)} |" for reason, names in reasons.items()]
    return ["| reason | classes |", "|---|---|", *lines]


def _listed(names: list[str]) -> str:
    return fill(", ".join(names), 120)


def _counts(families: list[dict[str, Any]]) -> list[str]:
    """A table of the outcomes by what the classes read, and the share of those that run."""
    head = ["input", *FORMS.values(), *TITLES, "not built", "native", "share that runs"]
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
        lines.append(f"| {' | '.join([KINDS.get(kind, kind), *map(str, cells), share])} |")
    return lines


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
