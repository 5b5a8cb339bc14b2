"""Parts of a stand-in's training: the package's own commands, one after another, each of which goes
on where it was; pairs of texts out of files (TSV, JSONL, or two files of lines, also .gz), cleaned,
shuffled, each once; and what is done with trained models: of two drafts the better is kept, models
are written in bfloat16, and a target's texts are scored beside a baseline's.
"""

from __future__ import annotations

import argparse
import gzip
import html
import json
import random
import re
import shlex
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from foretoken import load
from foretoken.cli.command import quiet
from foretoken.errors import ForetokenError, InputError, one_line
from foretoken.loading import sources
from foretoken.storage import files
from foretoken.train import corpus
from foretoken.train.distill import alpha
from foretoken.train.pair import Authors, pair
from foretoken_lab.quality import Scores, with_and_without

Sizes = Mapping[str, int]
T5_DRAFTS: dict[str, Sizes] = {  # about a fourth and a twelfth of a target of 4M parameters
    "draft-4": {
        "encoder_layers": 2,
        "decoder_layers": 1,
        "hidden": 128,
        "feed_forward": 288,
        "heads": 4,
    },
    "draft-12": {
        "encoder_layers": 1,
        "decoder_layers": 1,
        "hidden": 64,
        "feed_forward": 128,
        "heads": 4,
    },
}


def told(main: Callable[[], None]) -> None:
    """Run a script's main; bad input is one line, and exit status 2."""
    try:
        main()
    except (ForetokenError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        sys.exit(2)


def positive(text: str) -> int:
    """An option's value."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def foretoken(*arguments: object) -> None:
    """Run `foretoken WORDS`, shown first. Where it fails, the script ends with its exit code."""
    _run("foretoken", *arguments)


def lab(*arguments: object) -> None:
    """Run `foretoken-lab WORDS`, as `foretoken`."""
    _run("foretoken-lab", *arguments)


def _run(name: str, *arguments: object) -> None:
    command = [str(word) for word in arguments]
    print(f"\n$ {name} {shlex.join(command)}", flush=True)
    module = name.replace("-", "_")
    code = subprocess.run([sys.executable, "-m", module, *command]).returncode
    if code:
        sys.exit(code)


def flags(values: Mapping[str, object]) -> list[object]:
    """{"kv_heads": 2} as --kv-heads 2; True as the flag alone, False as nothing."""
    options_given: list[object] = []
    for name, value in values.items():
        if value is False:
            continue
        flag = f"--{name.replace('_', '-')}"
        options_given += [flag] if value is True else [flag, value]
    return options_given


def seq2seq(data: Path, out: Path, options: Mapping[str, object]) -> None:
    """Train an encoder-decoder on pairs."""
    lab("train", "seq2seq", "--data", data, "--out", out, *flags(options))


def distill(data: Path, out: Path, draft: str, options: Mapping[str, object]) -> None:
    """OUT/DRAFT-taught: the draft after lessons from OUT/target."""
    models = ("--target", out / "target" / "model", "--draft", out / draft / "model")
    paths = ("--data", data, "--out", out / f"{draft}-taught")
    foretoken("train", "distill", *models, *paths, *flags(options))


def tables(out: Path, data: Path, tokenizer: Path) -> None:
    """A unigram and a bigram table."""
    for order, name in ((1, "unigram"), (2, "bigram")):
        table = out / f"{name}.safetensors"
        if not table.exists():
            source = ("--data", data, "--tokenizer", tokenizer)
            foretoken("train", "ngram", *source, "--order", order, "--out", table)


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
    held_out = corpus.read(data, tokenizer, length, encoder_decoder=encoder_decoder).held_out
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
    """Return scores of the target's greedy texts, plain and with a draft, and of a baseline's."""
    quiet()
    prompts, references = (list(side) for side in zip(*test, strict=True))
    spec = load(out / "models" / "target", out / "models" / draft)
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


Pair = tuple[str, str]
SPACED = ((r" ([.,;:!?%)\]])", r"\1"), (r"([(\[]) ", r"\1"), (r" ('s|n't)\b", r"\1"))


def read(name: str, keys: tuple[str, str]) -> list[Pair]:
    """Sources and targets. `name`: a .tsv or .jsonl file, or the common head of two files of lines,
    NAME.KEY each. `keys`: how source and target are called in JSON or in the files' names."""
    path = Path(name)
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return [_row(f"{path}, line {n}", line, keys) for n, line in enumerate(lines(path), 1)]
    if path.name.endswith((".tsv", ".tsv.gz")):
        rows = [line.split("\t") for line in lines(path)]
        for number, row in enumerate(rows, 1):
            if len(row) != 2:
                raise InputError(
                    f"{path}, line {number}: {len(row)} columns; give source, tab, target"
                )
        return [(source, target) for source, target in rows]
    sides = [lines(_either(Path(f"{name}.{key}"))) for key in keys]
    if len(sides[0]) != len(sides[1]):
        raise InputError(f"{name} has {len(sides[0])} sources and {len(sides[1])} targets")
    return list(zip(*sides, strict=True))


def _row(place: str, line: str, keys: tuple[str, str]) -> Pair:
    try:
        row = files.parse_json(line)
        source, target = (row[key] for key in keys)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{place} is no object with {keys[0]} and {keys[1]} ({type(error).__name__}); "
            "name them in --keys"
        ) from None
    return source, target


def lines(path: Path) -> list[str]:
    """Return the lines of a text file, packed or not."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    try:
        content = gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be unpacked: {error}") from None
    return content.decode("utf-8-sig", errors="replace").removesuffix("\n").split("\n")


def _either(path: Path) -> Path:
    packed = path.with_name(f"{path.name}.gz")
    return packed if packed.exists() else path


def clean(text: str) -> str:
    """Return a text as it is written: tokens that an earlier program set apart stand together
    again."""
    text = html.unescape(text.replace(" @-@ ", "-"))
    for apart, together in SPACED:
        text = re.sub(apart, together, text)
    return " ".join(text.split())


def cleaned(pairs: Iterable[Pair], banned: Iterable[str], seed: int = 0) -> list[Pair]:
    """Pairs to learn from: every source once, none that is banned or empty; shuffled."""
    sources = {clean(source) for source in banned}
    cleaned_pairs: list[Pair] = []
    for source, target in ((clean(s), clean(t)) for s, t in pairs):
        if source and target and source not in sources:
            sources.add(source)
            cleaned_pairs.append((source, target))
    random.Random(seed).shuffle(cleaned_pairs)
    return cleaned_pairs


def write(path: Path, pairs: Iterable[Pair]) -> None:
    """Write pairs as the package's trainers read them: {"source": ..., "target": ...} on each
    line."""
    rows = [json.dumps({"source": s, "target": t}, ensure_ascii=False) for s, t in pairs]
    files.write(path, "\n".join(rows).encode())
    print(f"{path}: {len(rows)} pairs", flush=True)
