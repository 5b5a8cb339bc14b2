"""Train a small Llama-architecture model on a folder of text: `foretoken train lm`.

Batches depend on the seed and the step alone, so a run that was killed resumes from its last
checkpoint with the same data. Muon for the matrices, AdamW for the rest; warm-up, plateau, linear
decay over the last quarter.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from foretoken.errors import InputError
from foretoken.train import corpus

Report = Callable[
    [int, float, float | None], None
]  # step, training loss, held-out loss where measured


@dataclass(frozen=True, slots=True)
class Shape:
    """The model's size; a tied embedding of `vocab_size` rows comes on top."""

    layers: int = 16
    hidden: int = 192
    feed_forward: int = 512
    heads: int = 6
    kv_heads: int = 2
    vocab_size: int = 4096


@dataclass(frozen=True, slots=True)
class Recipe:
    """How long and how fast to train."""

    steps: int = 2000
    batch: int = 8
    context: int = 512
    learning_rate: float = 3e-3
    warmup: int = 100
    decay: float = 0.25
    seed: int = 0
    save_every: int = 100


def train_lm(
    data: Path,
    out: Path,
    shape: Shape,
    recipe: Recipe,
    *,
    tokenizer: Path | None,
    init: Path | None,
    report: Report,
) -> dict[str, Any]:
    """Train until `recipe.steps`, then write the model in transformers' layout to `out`; returns
    the summary.

    `tokenizer`: a folder whose tokenizer is used instead of a new one. `init`: a folder whose
    weights are the start. A checkpoint in `out` is resumed.
    """
    _check(shape, recipe)
    texts = corpus.read_texts(data)
    out.mkdir(parents=True, exist_ok=True)
    words = _tokenizer(out, texts, shape, recipe, tokenizer or init)
    books = corpus.build(texts, words)
    if len(books.train) <= recipe.context or len(books.held_out) <= recipe.context:
        raise InputError(
            f"{data} gives {len(books.train)} tokens to train on and {len(books.held_out)} held "
            f"out; give more text, or a context below {min(len(books.train), len(books.held_out))}"
        )
    run = _Run(out, shape, recipe, words, init)
    while run.step < recipe.steps:
        loss = run.train_step(books.train)
        measured = None
        if run.step % recipe.save_every == 0 or run.step == recipe.steps:
            measured = held_out_loss(run.model, books.held_out, recipe.context, windows=24)
            run.save(loss, measured)
        report(run.step, loss, measured)
    return run.export(books)


def _check(shape: Shape, recipe: Recipe) -> None:
    sizes = {name: getattr(shape, name) for name in Shape.__slots__}
    sizes |= {"steps": recipe.steps, "batch": recipe.batch, "context": recipe.context}
    for name, value in sizes.items():
        if value < 1:
            raise InputError(f"{name} is {value}; give 1 or more")
    for name, parts in (("hidden", "heads"), ("heads", "kv_heads")):
        if sizes[name] % sizes[parts]:
            raise InputError(f"{name} is {sizes[name]}; give a multiple of {parts}, {sizes[parts]}")


class _Run:
    """Model, optimisers and step of one training run, as saved in `out/checkpoint.pt`."""

    def __init__(
        self,
        out: Path,
        shape: Shape,
        recipe: Recipe,
        words: PreTrainedTokenizerFast,
        init: Path | None,
    ) -> None:
        self.out, self.recipe, self.words, self.step, self.seconds = out, recipe, words, 0, 0.0
        torch.manual_seed(recipe.seed)
        self.model = _weights(init) if init else LlamaForCausalLM(_config(shape, recipe, words))
        rows, ids = self.model.config.vocab_size, max(words.get_vocab().values()) + 1
        if rows < ids:
            raise InputError(f"{init} has {rows} rows for {ids} tokens; leave --tokenizer out")
        self.model.config.max_position_embeddings = recipe.context
        named = list(self.model.named_parameters())
        matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
        rest = [p for name, p in named if p.ndim != 2 or "embed" in name]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=recipe.learning_rate, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        if (out / "checkpoint.pt").exists():
            self.load()

    def train_step(self, ids: np.ndarray) -> float:
        """One optimiser step; returns the loss in nats per token."""
        start = time.perf_counter()
        rate = learning_rate(self.step, self.recipe)
        batch = _batch(ids, self.recipe, self.step)
        self.model.train()
        loss = _loss(self.model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.seconds += time.perf_counter() - start
        return loss.item()

    def save(self, loss: float, measured: float) -> None:
        """Write the checkpoint beside its final name first, so that a kill or a full disk leaves
        the old one whole."""
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
        }
        part = self.out / "checkpoint.part"
        torch.save(state, part)
        os.replace(part, self.out / "checkpoint.pt")
        line = {
            "step": self.step,
            "loss": round(loss, 4),
            "held_out": round(measured, 4),
            "seconds": round(self.seconds),
        }
        with (self.out / "log.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")

    def load(self) -> None:
        path = self.out / "checkpoint.pt"
        try:
            state = torch.load(path, weights_only=True)
            self.model.load_state_dict(state["model"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.step, self.seconds = state["step"], state["seconds"]
        except Exception as error:  # a broken file raises many kinds, another shape a RuntimeError
            raise InputError(
                f"{path} is no checkpoint of this model ({type(error).__name__}); "
                "give the shape it was begun with, or another --out"
            ) from None

    def export(self, books: corpus.Corpus) -> dict[str, Any]:
        """The model in bfloat16 with its tokenizer, and what was measured, in `out/model`."""
        folder = self.out / "model"
        half = LlamaForCausalLM(self.model.config).bfloat16()
        half.load_state_dict(self.model.state_dict())
        half.save_pretrained(folder)
        self.words.save_pretrained(folder)
        nats = held_out_loss(
            half.float(), books.held_out, self.recipe.context
        )  # of the rounded weights, as shipped
        summary = {
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "steps": self.step,
            "tokens_seen": self.step * self.recipe.batch * self.recipe.context,
            "train_tokens": len(books.train),
            "held_out_tokens": len(books.held_out),
            "held_out_nats_per_token": nats,
            "held_out_bits_per_byte": nats
            * len(books.held_out)
            / books.held_out_bytes
            / math.log(2),
            "seconds": self.seconds,
        }
        (self.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        return summary


def learning_rate(step: int, recipe: Recipe) -> float:
    """Linear warm-up, plateau, linear decay to zero over the last `decay` of the steps."""
    up = (step + 1) / max(1, recipe.warmup)
    down = (recipe.steps - step) / max(1.0, recipe.decay * recipe.steps)
    return recipe.learning_rate * min(1.0, up, down)


@torch.inference_mode()
def held_out_loss(
    model: LlamaForCausalLM, ids: np.ndarray, context: int, windows: int | None = None
) -> float:
    """Nats per token; each window's second half is scored, its first half being context. All
    windows unless told."""
    model.eval()
    stride = context // 2
    starts = list(range(0, len(ids) - context, stride))
    if windows is not None:
        starts = starts[:: max(1, len(starts) // windows)]
    losses = []
    for i in range(0, len(starts), 8):
        batch = torch.from_numpy(
            np.stack([ids[s : s + context + 1] for s in starts[i : i + 8]]).astype(np.int64)
        )
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits[:, -stride:]
        losses.append(
            functional.cross_entropy(
                logits.flatten(0, 1).float(), batch[:, -stride:].flatten(), reduction="sum"
            )
        )
    return float(torch.stack(losses).sum()) / (len(starts) * stride)


def _loss(model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def _batch(ids: np.ndarray, recipe: Recipe, step: int) -> torch.Tensor:
    starts = np.random.default_rng((recipe.seed, step)).integers(
        0, len(ids) - recipe.context, recipe.batch
    )
    return torch.from_numpy(
        np.stack([ids[s : s + recipe.context + 1] for s in starts]).astype(np.int64)
    )


def _weights(folder: Path) -> LlamaForCausalLM:
    try:
        return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    except Exception as error:  # the library raises many kinds
        line = " ".join(str(error).split())[:200]
        raise InputError(f"{folder} holds no Llama model that can be read: {line}") from None


def _config(shape: Shape, recipe: Recipe, words: PreTrainedTokenizerFast) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(words),
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=recipe.context,
        tie_word_embeddings=True,
        bos_token_id=cast(int, words.bos_token_id),
        eos_token_id=cast(int, words.eos_token_id),
    )


def _tokenizer(
    out: Path, texts: list[str], shape: Shape, recipe: Recipe, given: Path | None
) -> PreTrainedTokenizerFast:
    folder = given or out / "tokenizer"
    if given is None and not folder.exists():
        part = out / "tokenizer.part"  # a kill leaves no half of one
        train = corpus.split(texts)[0]
        corpus.train_tokenizer(train, shape.vocab_size, recipe.context).save_pretrained(part)
        os.replace(part, folder)
    return corpus.read_tokenizer(folder)
