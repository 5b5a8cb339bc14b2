"""A training run and its folder: optimizers, steps, and a checkpoint that is complete at any time.

A run that was killed resumes from its last checkpoint; if the loss depends only on the step, the
result equals an uninterrupted run's. Muon trains matrices; AdamW trains the other weights. The
learning rate warms up, stays constant, then decays linearly. Depends on neither the data nor the
kind of model.
"""

from __future__ import annotations

import csv
import io
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foretoken.errors import InputError
from foretoken.storage import files
from foretoken.train.recipe import TrainingRecipe

# fields that a resumed run may not change
FIXED_FIELDS = ("batch", "learning_rate", "warmup", "seed", "bfloat16")


def make_run_folder(path: Path) -> Path:
    """Create the folder if it is missing, and return it. Raises InputError if `path` is a file."""
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is a file; give another --out: the run needs a folder there")
    path.mkdir(parents=True, exist_ok=True)
    return path


class TrainingLoop:
    """A model in training. `saved_values` (tensors and plain values) are part of the checkpoint."""

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        recipe: TrainingRecipe,
        settings: dict[str, Any] | None = None,
    ) -> None:
        """Resume from the checkpoint in `folder`, if there is one.

        `settings` are plain values that must be the same in a resumed run. Raises InputError for a
        checkpoint of another model, of other settings or of another recipe; of the recipe, only
        `steps`, `save_every`, `patience` and `decay` may change.
        """
        self.folder, self.model, self.recipe = folder, model, recipe
        self.settings = {name: getattr(recipe, name) for name in FIXED_FIELDS} | (settings or {})
        self.step, self.seconds = 0, 0.0
        self.saved_values: dict[str, Any] = {}
        self.optimizers = make_optimizers(model, recipe.learning_rate)
        if self.checkpoint.exists():
            self._load()

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    @property
    def is_due(self) -> bool:
        """True if alpha should be measured and a checkpoint written after this step."""
        return self.step % self.recipe.save_every == 0 or self.step == self.recipe.steps

    @property
    def best(self) -> dict[str, Any]:
        """The best weights so far, with `score` and `step`; empty before `record_score`."""
        return self.saved_values.get("best", {})

    def record_score(self, score: float) -> None:
        """Store the current weights as the best if `score` is higher than the best so far."""
        if not self.best or score > self.best["score"]:
            weights = {name: w.detach().clone() for name, w in self.model.state_dict().items()}
            self.saved_values["best"] = {"score": score, "step": self.step, "weights": weights}

    @property
    def is_stalled(self) -> bool:
        """True after `patience` measurements without improvement."""
        patience = self.recipe.patience * self.recipe.save_every
        return bool(patience and self.best and self.step - self.best["step"] >= patience)

    def run_steps(self, loss_at: Callable[[int], Tensor]) -> Iterator[float]:
        """Make the remaining optimizer steps, until `recipe.steps` or until the run is stalled, and
        yield the loss of each step."""
        while self.step < self.recipe.steps and not self.is_stalled:
            yield self.advance(loss_at)

    def advance(self, loss_at: Callable[[int], Tensor]) -> float:
        """Make one optimizer step on the loss `loss_at(step)`, and return the loss.

        Raises InputError for a non-finite loss or gradient; the weights are then unchanged.
        """
        start = time.perf_counter()
        rate = compute_learning_rate(self.step, self.recipe)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.recipe.bfloat16):
            loss = loss_at(self.step)
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.require_finite(loss=loss.item(), slope=float(grad_norm))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.seconds += time.perf_counter() - start
        return loss.item()

    def require_finite(self, **figures: float) -> None:
        """Raise InputError, with the remedy, if a named figure (such as the loss) is not finite."""
        for name, value in figures.items():
            if not math.isfinite(value):
                raise InputError(
                    f"the run diverged at step {self.step}: {name} is {value}; give a "
                    f"learning_rate below {self.recipe.learning_rate:g} and another --out "
                    f"({self.folder} keeps its last checkpoint, if any)"
                )

    def save(self, **figures: float) -> None:
        """Write the checkpoint, then append the named figures (such as alpha) to `log.csv`. Raises
        InputError, before anything is written, if a figure is not finite."""
        self.require_finite(**figures)
        self._write_checkpoint()
        rounded = {name: round(value, 4) for name, value in figures.items()}
        line = {"step": self.step, **rounded, "seconds": round(self.seconds)}
        log = self.folder / "log.csv"
        with files.name_path_in_errors(log), log.open("a", newline="") as lines:
            writer = csv.DictWriter(lines, line, lineterminator="\n")
            if not lines.tell():
                writer.writeheader()
            writer.writerow(line)

    def _write_checkpoint(self) -> None:
        """Write the checkpoint atomically: a kill or a full disk leaves the old one complete."""
        state = {
            "settings": self.settings,
            "step": self.step,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "kept": self.saved_values,
        }
        content = io.BytesIO()
        torch.save(state, content)
        part = self.folder / "checkpoint.part"
        files.write_atomically(self.checkpoint, content.getbuffer(), part=part)

    def export(self, network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Write `network` in transformers' layout to `model` in the folder."""
        with files.replace_folder(self.folder / "model") as part:
            network.save_pretrained(part)
            if tokenizer is not None:
                tokenizer.save_pretrained(part)

    def summarize(self, **figures: Any) -> dict[str, Any]:
        """Return the summary of the run and write it to `summary.json`: the figures, the number of
        parameters, the steps and the seconds."""
        parameters = sum(p.numel() for p in self.model.parameters())
        summary = {"parameters": parameters, "steps": self.step, **figures}
        summary["seconds"] = self.seconds
        files.write_atomically(
            self.folder / "summary.json", (json.dumps(summary, indent=2) + "\n").encode()
        )
        return summary

    def _load(self) -> None:
        try:
            state = torch.load(self.checkpoint, weights_only=True)
            settings = {"bfloat16": False} | state["settings"]  # older checkpoints have no bfloat16
            if settings == self.settings:
                self.model.load_state_dict(state["model"])
                for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                    optimizer.load_state_dict(saved)
                self.step, self.seconds = state["step"], state["seconds"]
                self.saved_values = state["kept"]
        except Exception as error:  # a damaged file: many types; another shape: RuntimeError
            raise InputError(
                f"{self.checkpoint} is not a checkpoint of this model ({type(error).__name__}); "
                "give the shape that the run began with, or another --out"
            ) from None
        for name in sorted(settings.keys() | self.settings.keys()):
            was, now = settings.get(name), self.settings.get(name)
            if was != now:
                raise InputError(
                    f"{self.checkpoint} began with {name} {was}, not {now}; "
                    f"give {name} {was}, or another --out"
                )
        if self.step > self.recipe.steps:
            raise InputError(
                f"{self.checkpoint} has {self.step} steps, so steps {self.recipe.steps} are done "
                f"already; give {self.step} steps or more, or another --out"
            )


def compute_learning_rate(step: int, recipe: TrainingRecipe) -> float:
    """Return the learning rate of a step: linear warm-up, plateau, linear decay to zero over the
    last `recipe.decay` of the steps."""
    warmup_factor = (step + 1) / max(1, recipe.warmup)
    decay_factor = (recipe.steps - step) / max(1.0, recipe.decay * recipe.steps)
    return recipe.learning_rate * min(1.0, warmup_factor, decay_factor)


def make_optimizers(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for matrices between embeddings and output layer, AdamW for other weights."""
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    outer = {id(p) for m in (*tables, head) if m is not None for p in m.parameters()}
    inner = {id(p) for p in model.parameters() if p.ndim == 2 and id(p) not in outer}
    matrices = [p for p in model.parameters() if id(p) in inner]
    others = [p for p in model.parameters() if id(p) not in inner]
    adam = torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    if not matrices:
        return [adam]
    return [torch.optim.Muon(matrices, lr=rate, adjust_lr_fn="match_rms_adamw"), adam]
