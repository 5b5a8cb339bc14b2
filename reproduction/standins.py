"""Stand-ins: small models in the shapes of the paper's, trained on your text by the package's own
commands, one after another, each of which goes on where it was.

    python -m reproduction.standins translation PAIRS ... --out runs/translation
    python -m reproduction.standins news TEXT ... --out runs/news
    python -m reproduction.standins digits --out runs/digits

OUT/target/model and OUT/DRAFT/model are then in bfloat16; OUT/DRAFT-taught/model is the draft after
it was distilled. `look-up` and `lead` score the baselines of translations and summaries.
"""

from __future__ import annotations

import gzip
import html
import json
import random
import re
import shlex
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from foretoken.cli import option
from foretoken.cli.command import join_paragraph_lines
from foretoken.cli.script import run_app
from foretoken.errors import InputError
from foretoken.storage import files
from foretoken.train import corpus

Pair = tuple[str, str]
Sizes = tuple[int, ...]
T5 = ("encoder_layers", "decoder_layers", "hidden", "feed_forward", "heads")
TRANSLATION = (3, 4, 192, 480, 4)
T5_DRAFTS: dict[str, Sizes] = {  # about a fourth, a twelfth and a fortieth of a target of 4M
    "draft-4": (2, 1, 128, 288, 4),
    "draft-12": (1, 1, 64, 128, 4),
    "draft-40": (1, 1, 24, 48, 2),
}
LLAMA = ("hidden", "feed_forward", "layers", "heads", "kv_heads")
PAPER: dict[str, Sizes] = {  # of section 4.2; its widths are divided
    "target": (768, 3072, 12, 12, 12),
    "draft": (256, 1024, 2, 4, 4),
}
WIDTHS = ("hidden", "feed_forward")
IMAGE_GPT: dict[str, Sizes] = {"target": (96, 4, 4), "draft": (32, 2, 2)}  # width, layers, heads
GREYS, ORDER = 17, 3  # of a pixel of the digits; of their table
LENGTH = 128  # tokens of a translation
WORDS, RATIO = 120, 3.0  # a longer sentence, or a pair of more different lengths, is left out
PROMPTS, BEGINNING = 200, 8  # of the recipe of news; words of each
SPACED = ((r" ([.,;:!?%)\]])", r"\1"), (r"([(\[]) ", r"\1"), (r" ('s|n't)\b", r"\1"))

Out = Annotated[Path, Option(help="Folder for data and models.")]
Keys = Annotated[tuple[str, str], Option(help="Source and target, in JSON or as names' endings.")]
Steps = Annotated[int, Option(min=1, help="At most: a run ends when its loss stops falling.")]
Taught = Annotated[int, Option("--distill-steps", min=1, help="Steps in which a draft is taught.")]
Bfloat16 = Annotated[
    bool, Option("--bfloat16", help="Multiply in it: see python -m reproduction train.")
]
app = typer.Typer(no_args_is_help=True, add_completion=False, help="Train the stand-ins.")


def registered(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command of a function, which remains one to call."""
    return app.command(help=join_paragraph_lines(function))(function)


@registered
def translation(
    pairs: Annotated[
        list[str], Argument(help="A .jsonl file, or the common head of NAME.en and NAME.de (.gz).")
    ],
    out: Out,
    test: Annotated[list[str] | None, Option(help="Pairs never trained on.")] = None,
    keys: Keys = ("en", "de"),
    steps: Steps = 20_000,
    draft_steps: Steps = 6000,
    distill_steps: Taught = 600,
    bfloat16: Bfloat16 = False,
) -> None:
    """Train the translation ladder: a T5 target of 4.4M parameters and drafts of 1/4, 1/12 and 1/40
    of it, with the unigram and the bigram of the target language."""
    data = out / "pairs.jsonl"
    banned = [source for name in test or [] for source, _ in read(name, keys)]
    every = (pair for name in pairs for pair in read(name, keys))
    write(data, filter(alike, cleaned(every, banned)))
    common = {"vocab_size": 4096, "length": LENGTH, "save_every": 200, "patience": 10}
    common["bfloat16"] = bfloat16
    seq2seq(data, out / "target", TRANSLATION, common, steps=steps)
    for name, sizes in T5_DRAFTS.items():
        tokenizer = out / "target" / "tokenizer"
        seq2seq(data, out / name, sizes, common, steps=draft_steps, tokenizer=tokenizer)
        lesson = {"steps": distill_steps, "batch": 64, "held_out": 64, "save_every": 100}
        distill(data, out, name, length=LENGTH, **lesson)
    tables(out, data)


@registered
def news(
    texts: Annotated[list[Path], Argument(help="Text, packed (.gz) or not.")],
    out: Out,
    divisor: Annotated[int, Option(min=1, help="Of the paper's widths.")] = 8,
    steps: Steps = 20_000,
    distill_steps: Taught = 600,
    bfloat16: Bfloat16 = False,
) -> None:
    """Train the GPT-like pair of the paper (section 4.2; 97M and 6M parameters) at an eighth of its
    widths, of the Llama architecture: 12 layers and 2 on news text, a vocabulary of 8192."""
    data = out / "text"
    prepare_news(texts, out)
    common = {"vocab_size": 8192, "context": 256, "batch": 16, "patience": 10}
    for model, sizes in PAPER.items():
        sized = zip(LLAMA, sizes, strict=True)
        shape = {name: n // divisor if name in WIDTHS else n for name, n in sized}
        own = {} if model == "target" else {"tokenizer": out / "target" / "model"}
        options = {**shape, **common, **own, "steps": steps, "bfloat16": bfloat16}
        execute("reproduction", "train", "lm", data=data, out=out / model, **options)
    distill(data, out, "draft", steps=distill_steps, target_generated=0.5, on_policy=0.25)
    tables(out, data)


@registered
def digits(
    out: Out,
    steps: Steps = 600,
    draft_steps: Steps = 1500,
    bfloat16: Bfloat16 = False,
) -> None:
    """Train an ImageGPT of 0.4M parameters and a draft of 1/15 on the 8x8 digits that scikit-learn
    ships, and count their pixels in a table. A token is a pixel's grey; an image begins with its
    digit, or with none."""
    with option.require_extra("reproduction"):
        datasets = import_module("sklearn.datasets")
    import numpy as np  # late: these take seconds
    from transformers import ImageGPTConfig

    from foretoken.train.recipe import TrainingRecipe
    from reproduction.train import train_images
    from reproduction.train_ngram import fit

    pixels, names = datasets.load_digits(return_X_y=True)
    images = np.column_stack([GREYS + names, pixels]).astype(int)
    unnamed = GREYS + 10
    sizes = {"vocab_size": unnamed + 2, "n_positions": images.shape[1]}  # the last id has no logit
    for name, shape in IMAGE_GPT.items():
        most = steps if name == "target" else draft_steps
        named = dict(zip(("n_embd", "n_layer", "n_head"), shape, strict=True))
        config = ImageGPTConfig(**sizes, **named)
        recipe = TrainingRecipe(most, 64, save_every=100, bfloat16=bfloat16)
        print(f"\n{name}: {config.n_layer} layers of {config.n_embd}", flush=True)
        train_images(images, unnamed, out / name, config, recipe, _show_step)
    fit(images, unnamed + 1, ORDER).save(out / "ngram.safetensors")


def _show_step(step: int, loss: float, held_out: float | None) -> None:
    if held_out is not None:
        print(f"step {step}: loss {loss:.3f}, held out {held_out:.3f} nats a pixel", flush=True)


@registered
def look_up(
    known: Annotated[str, Argument(help="Pairs to look up in, such as OUT/pairs.jsonl.")],
    test: Annotated[list[str], Argument(help="Pairs to translate.")],
    keys: Keys = ("en", "de"),
    known_keys: Annotated[tuple[str, str], Option(help="Source and target of KNOWN.")] = (
        "source",
        "target",
    ),
) -> None:
    """Score the baseline of translations: the known pair whose source is most alike."""
    from reproduction.experiments import quality  # late: torch takes seconds

    pairs = read(known, known_keys)
    for name in test:
        sources, references = zip(*read(name, keys), strict=True)
        _show(name, quality.translation(quality.looked_up(pairs, sources), references))


@registered
def lead(
    articles: Annotated[list[str], Argument(help="A .jsonl file of articles and summaries.")],
    keys: Keys = ("article", "highlights"),
    sentences: Annotated[int, Option(min=1, help="Sentences of the beginning.")] = 3,
) -> None:
    """Score the baseline of summaries: an article's first sentences."""
    from reproduction.experiments import quality  # late: torch takes seconds

    for name in articles:
        texts, references = zip(*read(name, keys), strict=True)
        _show(name, quality.rouge([quality.lead(text, sentences) for text in texts], references))


def _show(name: str, scores: Mapping[str, float]) -> None:
    print(f"{name}: {', '.join(f'{score} {value:.1f}' for score, value in scores.items())}")


def execute(module: str, *words: str, **options: object) -> None:
    """Run a module's command, shown first, {"kv_heads": 2} being --kv-heads 2 and True a flag
    alone. Where it fails, the script ends with its exit code."""
    line = ["-m", module, *words]
    for name, value in options.items():
        if value is not False:
            line += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    print(f"\n$ {shlex.join(['python', *line])}", flush=True)
    code = subprocess.run([sys.executable, *line]).returncode
    if code:
        raise typer.Exit(code)


def seq2seq(
    data: Path, out: Path, sizes: Sizes, common: Mapping[str, object], **more: object
) -> None:
    """Train an encoder-decoder on pairs."""
    options = {**dict(zip(T5, sizes, strict=False)), **common, **more}
    execute("reproduction", "train", "seq2seq", data=data, out=out, **options)


def distill(data: Path, out: Path, name: str, **options: object) -> None:
    """OUT/NAME-taught: the draft after lessons from OUT/target."""
    models = {"target": out / "target" / "model", "draft": out / name / "model"}
    folder = out / f"{name}-taught"
    execute("foretoken", "train", "distill", **models, data=data, out=folder, **options)


def tables(out: Path, data: Path) -> None:
    """A unigram and a bigram table."""
    source = {"data": data, "tokenizer": out / "target" / "model"}
    for order, name in ((1, "unigram"), (2, "bigram")):
        table = out / f"{name}.safetensors"
        if not table.exists():
            execute("reproduction", "train", "ngram", **source, order=order, out=table)


def read(name: str, keys: tuple[str, str]) -> list[Pair]:
    """Sources and targets. `name`: a .jsonl file, or the common head of two files of lines,
    NAME.KEY each, packed (.gz) or not."""
    if name.endswith((".jsonl", ".jsonl.gz")):
        return [
            _row(f"{name}, line {n}", line, keys) for n, line in enumerate(lines(Path(name)), 1)
        ]
    packed = [Path(f"{name}.{key}.gz") for key in keys]
    sources, targets = (lines(path if path.exists() else path.with_suffix("")) for path in packed)
    if len(sources) != len(targets):
        raise InputError(f"{name} has {len(sources)} sources and {len(targets)} targets")
    return list(zip(sources, targets, strict=True))


def _row(place: str, line: str, keys: tuple[str, str]) -> Pair:
    try:
        source, target = (files.parse_json(line)[key] for key in keys)
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
        content = gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    return content.decode("utf-8-sig", errors="replace").removesuffix("\n").split("\n")


def clean(text: str) -> str:
    """Return a text as it is written: tokens that an earlier program set apart stand together
    again."""
    text = html.unescape(text.replace(" @-@ ", "-"))
    for apart, together in SPACED:
        text = re.sub(apart, together, text)
    return " ".join(text.split())


def cleaned(pairs: Iterable[Pair], banned: Iterable[str] = (), seed: int = 0) -> list[Pair]:
    """Pairs to learn from: every source once, none that is banned or empty; shuffled."""
    sources = {clean(source) for source in banned}
    kept: list[Pair] = []
    for source, target in ((clean(s), clean(t)) for s, t in pairs):
        if source and target and source not in sources:
            sources.add(source)
            kept.append((source, target))
    random.Random(seed).shuffle(kept)
    return kept


def alike(pair: Pair) -> bool:
    """Tell whether a pair may be a translation: neither side long, nor much longer than the
    other."""
    shorter, longer = sorted(len(text.split()) for text in pair)
    return longer <= min(WORDS, RATIO * shorter + 2)


def write(path: Path, pairs: Iterable[Pair]) -> None:
    """Write pairs as the package's trainers read them: {"source": ..., "target": ...} on each
    line."""
    rows = [json.dumps({"source": s, "target": t}, ensure_ascii=False) for s, t in pairs]
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_atomically(path, "\n".join(rows).encode())
    print(f"{path}: {len(rows)} pairs", flush=True)


def prepare_news(texts: list[Path], out: Path) -> None:
    """The texts in files that the trainer reads, in parts, of which it holds some out, and
    beginnings of lines of those."""
    every = [line for path in texts for line in lines(path)]
    (out / "text").mkdir(parents=True, exist_ok=True)
    size = -(-len(every) // corpus.HELD_OUT_EVERY**2)
    parts = ["\n".join(every[start : start + size]) for start in range(0, len(every), size)]
    for number, part in enumerate(parts):
        files.write_atomically(out / "text" / f"{number:03}.txt", part.encode())
    _, held_out = corpus.split_texts(parts)
    split = [line.split() for part in held_out for line in part.split("\n")]
    prompts = [" ".join(line[:BEGINNING]) for line in split if len(line) > BEGINNING]
    sample = prompts[:: max(1, len(prompts) // PROMPTS)][:PROMPTS]
    files.write_atomically(out / "prompts.txt", "\n".join(sample).encode())


if __name__ == "__main__":
    run_app(app)
