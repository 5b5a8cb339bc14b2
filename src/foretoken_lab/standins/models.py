"""What is done with trained stand-ins: of two drafts the better is kept, models are written in
bfloat16, and a target's texts are scored beside a baseline's."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

import foretoken
from foretoken.cli.command import quiet
from foretoken.loading import sources
from foretoken.storage import files
from foretoken.train import examples
from foretoken.train.distill import alpha
from foretoken.train.pair import pair
from foretoken.train.texts import Authors
from foretoken_lab.quality import Scores, with_and_without

TEXTS, SEED, GAMMA = 64, 1, 3  # held-out prompts of alpha; not the seed that distilling measures by
Score = Callable[[Sequence[str], Sequence[str]], Scores]


def chosen(out: Path, drafts: list[str], data: Path, length: int) -> dict[str, Any]:
    """Write OUT/models: the target and, of each draft and its distilled self, the one with the
    higher alpha, greedy and at temperature 1 together; returns all alphas."""
    quiet()
    target = out / "models" / "target"
    written(out / "target" / "model", target, tokenizer=True)
    alphas: dict[str, Any] = {}
    for name in drafts:
        alphas_of: dict[str, dict[str, float]] = {}
        for kind in ("", "-taught"):
            model = out / f"{name}{kind}" / "model"
            if model.is_dir():
                rounded = written(model, out / "rounded" / f"{name}{kind}")
                alphas_of[f"{name}{kind}"] = agreement(target, rounded, data, length)
        best = max(alphas_of, key=lambda kind: sum(alphas_of[kind].values()))
        written(out / best / "model", out / "models" / name)
        alphas[name] = {"kept": best, **alphas_of}
        print(f"{name}: {alphas_of}, kept {best}", flush=True)
    return alphas


def written(model: Path, to: Path, *, tokenizer: bool = False) -> Path:
    """The model in bfloat16, with its tokenizer if `tokenizer`; returns `to`."""
    to.parent.mkdir(parents=True, exist_ok=True)
    network = sources.source(model, None, False).network(torch.bfloat16, torch.device("cpu"))
    with files.folder(to) as part:
        network.bfloat16().save_pretrained(part)
        if tokenizer:
            AutoTokenizer.from_pretrained(model).save_pretrained(part)
    return to


def agreement(target: Path, draft: Path, data: Path, length: int) -> dict[str, float]:
    """alpha over the target's own texts behind held-out prompts, greedy and at temperature 1."""
    both = pair(str(target), str(draft), {}, SEED)
    tokenizer, encoder_decoder = both.together.tokenizer, both.together.target.encoder_decoder
    assert tokenizer is not None  # the target's
    held_out = examples.read(data, tokenizer, length, encoder_decoder=encoder_decoder).held_out
    alphas: dict[str, float] = {}
    for temperature in (0.0, 1.0):
        exam = Authors(both, temperature, length).exam(held_out, TEXTS, SEED)
        alphas[f"T={temperature:g}"] = alpha(both, exam, temperature)
    return alphas


def scores(
    out: Path,
    draft: str,
    test: list[tuple[str, str]],
    score: Score,
    length: int,
    baseline: Callable[[list[str]], list[str]],
) -> dict[str, Any]:
    """Of the target's greedy texts without draft tokens and with a draft's, and of a baseline's."""
    quiet()
    prompts, references = (list(side) for side in zip(*test, strict=True))
    spec = foretoken.load(out / "models" / "target", out / "models" / draft)
    comparison = with_and_without(
        spec, prompts, references, score, gamma=GAMMA, max_new_tokens=length
    )
    baseline_score = score(baseline(prompts), references)
    return {"texts": len(test), "draft": draft, **asdict(comparison), "baseline": baseline_score}


def record(out: Path, name: str, values: dict[str, Any]) -> None:
    """Put them in OUT/scores.json under that name, and print them."""
    path = out / "scores.json"
    records = json.loads(path.read_text()) if path.exists() else {}
    records[name] = values
    files.write(path, (json.dumps(records, indent=2) + "\n").encode())
    print(json.dumps({name: values}, indent=2), flush=True)
