"""Training of drafts that use the target's hidden states: the code that EAGLE-3 and DSpark share in
`foretoken train`.

The draft learns the target's distribution at the tokens of the training data, separately for each
depth: the index of a draft token within a step. The target's hidden states are computed once and
stored on disk.
"""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel

from foretoken.errors import InputError
from foretoken.models.stock.pair_files import get_default_taps
from foretoken.storage import files
from foretoken.train.corpus import Examples
from foretoken.train.distill import LOSSES, MIN_LOG_PROB
from foretoken.train.hidden_state_dataset import HiddenStateDataset, SequenceHiddenStates
from foretoken.train.loop import TrainingLoop, make_run_folder
from foretoken.train.pair import compute_fingerprint
from foretoken.train.recipe import TrainingRecipe, require_positive

POSITIONS_PER_CHUNK = 128  # positions whose distributions are computed at a time
MIN_PROB = 1e-12
BATCHES_PER_SORTED_GROUP = 16  # their sequences are sorted by length, to reduce padding

NumberedSequences = dict[int, list[int]]  # token ids by sequence number
# step, loss, and alpha at each depth if it was measured
TeachingProgress = Callable[[int, float, list[float] | None], None]


@dataclass(frozen=True, slots=True)
class Lesson(ABC):
    """Size of the draft, and settings of its training."""

    draft_vocab: int = 8192  # the most frequent tokens of the data
    intermediate: int | None = None  # width of the draft's MLP; None: the target's
    decay: float = 0.8  # weight of each depth's loss relative to the depth before
    loss: str = "lk"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int):
                require_positive(field.name, value)
        if not 0 < self.decay <= 1:
            raise InputError(f"decay is {self.decay}; give a number in (0, 1]")
        if self.loss not in LOSSES:
            raise InputError(f"loss is {self.loss!r}; give one of {', '.join(LOSSES)}")

    @abstractmethod
    def make_student(
        self, target: PreTrainedModel, sequences: NumberedSequences, seed: int
    ) -> Student:
        """Return a randomly initialized draft whose vocabulary is the most frequent tokens of
        `sequences`."""

    def get_layer_settings(self, target: PreTrainedModel) -> dict[str, Any]:
        """Return transformers' config entries for draft layers with the target's widths."""
        text: Any = target.config.get_text_config(decoder=True)
        same = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        return {
            **{name: getattr(text, name) for name in same if getattr(text, name, None)},
            "intermediate_size": self.intermediate or text.intermediate_size,
            "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-6),
            "max_position_embeddings": text.max_position_embeddings,
            "rope_parameters": text.rope_parameters,
            "vocab_size": text.vocab_size,
        }


class ComparedDistributions(NamedTuple):
    """Log probabilities that the target (`p`) and the draft (`q`) give the draft's tokens at N
    positions, `[N, Vd]`. The target's probabilities are normalized over its whole vocabulary.

    `confidence` is the draft's own estimate of `alpha`, `[N]`; None if the draft has no confidence
    head.
    """

    p: Tensor
    q: Tensor
    confidence: Tensor | None = None

    @property
    def alpha(self) -> Tensor:
        """The acceptance probability at each position: sum min(p, q), `[N]` (Corollary 3.6)."""
        return torch.minimum(self.p, self.q).exp().sum(-1)


class Student(ABC):
    """A draft in training. Its output layer consists of the target's weights for the draft's tokens
    and is not trained, so that a large vocabulary adds no weights to train.

    Args:
        network: All trained modules, with the output layer `head`.
        head: The output layer.
        config: The draft's config in speculators' format.
        ids: The target's id of each token in the draft's vocabulary, `[Vd]`.
        target: The target.
        depths: Number of draft tokens that the draft learns to predict, one after another.
    """

    def __init__(
        self,
        network: nn.Module,
        head: nn.Linear,
        config: dict[str, Any],
        ids: Tensor,
        target: PreTrainedModel,
        depths: int,
    ) -> None:
        self.network, self.head = network.requires_grad_(True), head
        self.config, self.ids, self.depths = config, ids, depths
        output: Any = target.get_output_embeddings()
        self.output_weight = output.weight.detach()[ids].float()
        head.weight = nn.Parameter(self.output_weight, requires_grad=False)
        self.embedding: Any = target.get_input_embeddings()

    @abstractmethod
    def gather_positions(
        self, sequences: list[SequenceHiddenStates], rng: random.Random | None
    ) -> Iterator[tuple[Tensor, ...]]:
        """Yield, for each depth, the tensors from which `compare` computes the distributions at N
        positions: the inputs of the target's output layer `[N, H]`, the log-sum-exp of the target's
        logits `[N]`, and the draft's own tensors. `rng` makes the random choices of training; None:
        no random choices, to measure alpha."""

    @abstractmethod
    def compare(self, hidden: Tensor, mass: Tensor, *own: Tensor) -> ComparedDistributions:
        """Return the target's and the draft's distributions at some of the positions of
        `gather_positions`, from the tensors that it yields: `hidden`, `mass` (the log-sum-exp) and
        `own`."""

    @abstractmethod
    def get_stored_name(self, name: str) -> str:
        """Return the name of a weight of `network` in speculators' format."""

    def compute_loss(
        self, sequences: list[SequenceHiddenStates], lesson: Lesson, rng: random.Random
    ) -> Tensor:
        """Return the loss over all depths; every position of a depth has the same weight.

        Distributions are computed for a few positions at a time, and recomputed for the gradients,
        because the distributions of a whole batch would not fit into memory. Small chunks also stay
        in the CPU's cache.
        """

        def sum_losses(*some: Tensor) -> Tensor:
            distributions = self.compare(*some)
            losses_by_position = LOSSES[lesson.loss](distributions.p, distributions.q)
            if distributions.confidence is not None:
                overlap = distributions.alpha.detach().clamp(max=1)
                log_confidence, log_doubt = (
                    x.clamp(min=MIN_PROB).log()
                    for x in (distributions.confidence, 1 - distributions.confidence)
                )
                losses_by_position = (
                    losses_by_position - overlap * log_confidence - (1 - overlap) * log_doubt
                )  # NaN if the run diverges
            return losses_by_position.sum()

        losses: list[Tensor] = []
        for k, positions in enumerate(self.gather_positions(sequences, rng)):
            sums = [
                checkpoint(sum_losses, *some, use_reentrant=False)
                for some in split_positions(positions)
            ]
            count = max(1, len(positions[0]))
            losses.append(lesson.decay**k * torch.stack(cast(list[Tensor], sums)).sum() / count)
        return torch.stack(losses).sum() / sum(lesson.decay**k for k in range(len(losses)))

    @torch.no_grad()
    def compute_target_log_probs(self, hidden: Tensor, mass: Tensor) -> Tensor:
        """Return the target's log probabilities `[N, Vd]` of the draft's tokens, from the inputs
        `[N, H]` of the target's output layer and the log-sum-exp `[N]` of its logits."""
        logits = (hidden.to(self.output_weight.dtype) @ self.output_weight.T).float()
        return (logits - mass[:, None]).clamp(min=MIN_LOG_PROB)

    def compute_logits(self, states: Tensor) -> Tensor:
        """Return logits `[N, Vd]` of the output layer, from its inputs `[N, H]`."""
        return states.to(self.output_weight.dtype) @ self.output_weight.T

    @torch.no_grad()
    def measure_alpha(
        self, dataset: HiddenStateDataset, sequences: NumberedSequences, batch: int
    ) -> list[float]:
        """Return the mean alpha at each depth over the sequences, `batch` sequences at a time."""
        totals, counts = [0.0] * self.depths, [0] * self.depths
        order = sorted(sequences, key=lambda n: len(sequences[n]))
        for i in range(0, len(order), batch):
            batch_states = [dataset.load(n) for n in order[i : i + batch]]
            for k, positions in enumerate(self.gather_positions(batch_states, None)):
                totals[k] += sum(
                    float(self.compare(*x).alpha.sum()) for x in split_positions(positions)
                )
                counts[k] += len(positions[0])
        return [total / max(1, n) for total, n in zip(totals, counts, strict=True)]

    def save(self, out: Path) -> None:
        """Write the draft in speculators' format, completely or not at all."""
        has_draft_id = torch.zeros(
            self.config["transformer_layer_config"]["vocab_size"], dtype=torch.bool
        )
        has_draft_id[self.ids] = True
        tensors = {self.get_stored_name(name): w for name, w in self.network.state_dict().items()}
        tensors |= {"d2t": self.ids - torch.arange(len(self.ids)), "t2d": has_draft_id}
        with files.replace_folder(out) as part:
            (part / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")
            contiguous = {name: x.detach().contiguous() for name, x in tensors.items()}
            (part / "model.safetensors").write_bytes(save(contiguous, {"format": "pt"}))


def split_positions(positions: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    """Split the tensors of `gather_positions` into chunks of POSITIONS_PER_CHUNK."""
    return zip(*(x.split(POSITIONS_PER_CHUNK) for x in positions), strict=True)


def make_config(
    kind: str, target: PreTrainedModel, layers: PreTrainedConfig, ids: Tensor, num_draft_tokens: int
) -> dict[str, Any]:
    """Return the config of a draft of any kind, in speculators' format."""
    named = {"vocab_size": layers.vocab_size, "model_type": layers.model_type}
    return {
        "speculators_model_type": kind,
        "speculators_version": "0.5.0",
        "draft_vocab_size": len(ids),
        "transformer_layer_config": layers.to_diff_dict() | named,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": num_draft_tokens}
            ],
            "verifier": {
                "name_or_path": target.name_or_path,
                "architectures": target.config.architectures or [type(target).__name__],
            },
        },
    }


def choose_taps(target: PreTrainedModel) -> tuple[int, ...]:
    """Return the target's taps, whose hidden states the draft uses."""
    return get_default_taps(target.config.get_text_config(decoder=True).num_hidden_layers)


def teach(
    target: PreTrainedModel,
    examples: Examples,
    out: Path,
    lesson: Lesson,
    recipe: TrainingRecipe,
    report: TeachingProgress,
    *,
    max_bytes: int,
    report_states: Callable[[int], None],
) -> dict[str, Any]:
    """Train a draft until step `recipe.steps` and write it to the folder `out`. Returns the
    summary. `report_states` is called with the number of sequences whose hidden states have been
    computed.

    A folder next to `out`, with the suffix .run, holds the checkpoint, the log, and the target's
    hidden states in at most `max_bytes` bytes. A resumed run gives the result of an uninterrupted
    run. Raises InputError if that folder belongs to another run.
    """
    if out.is_file():
        raise InputError(f"{out} is a file; give a folder as --out")
    folder = make_run_folder(out.with_name(f"{out.name}.run"))
    dataset = HiddenStateDataset(
        folder / "states", target, choose_taps(target), max_bytes, bfloat16=recipe.bfloat16
    )
    train, held_out = dataset.compute_missing(examples, report_states)
    student = lesson.make_student(target, train, recipe.seed)
    if recipe.bfloat16:  # converted once: autocast would convert it for every product
        student.output_weight = student.output_weight.bfloat16()
    settings = {
        "kind": student.config["speculators_model_type"],
        **asdict(lesson),
        "target": compute_fingerprint(target),
        "data": examples.digest,
    }
    loop = TrainingLoop(folder, student.network, recipe, settings | {"states": max_bytes})

    def loss_at(step: int) -> Tensor:
        batch = [dataset.load(i) for i in choose_batch(train, recipe, step)]
        return student.compute_loss(batch, lesson, random.Random(f"{recipe.seed} step {step}"))

    for loss in loop.run_steps(loss_at):
        measured = None
        if loop.is_due:
            measured = student.measure_alpha(dataset, held_out, recipe.batch)
            loop.record_score(sum(measured))
            loop.save(loss=loss, **{f"alpha_{k}": x for k, x in enumerate(measured, 1)})
        report(loop.step, loss, measured)
    student.network.load_state_dict(loop.best["weights"])
    measured = student.measure_alpha(dataset, held_out, recipe.batch)
    student.save(out)
    return {
        "draft_vocab": len(student.ids),
        "parameters": sum(x.numel() for x in student.network.parameters() if x.requires_grad),
        "texts": len(train),
        "tokens": sum(len(ids) for ids in train.values()),
        "steps": loop.step,
        "best_step": loop.best["step"],
        "alpha": measured,
        "seconds": loop.seconds,
    }


def find_frequent_tokens(sequences: NumberedSequences, count: int) -> Tensor:
    """Return the ids of the `count` most frequent tokens of the sequences, in ascending order."""
    counts = Counter(token for ids in sequences.values() for token in ids)
    return torch.tensor(sorted(token for token, _ in counts.most_common(count)))


def choose_batch(sequences: NumberedSequences, recipe: TrainingRecipe, step: int) -> list[int]:
    """Return the numbers of the sequences in a step's batch. The sequences of a batch have similar
    lengths; each sequence occurs at most once per epoch."""
    size = min(recipe.batch, len(sequences))
    steps_per_epoch = len(sequences) // size
    epoch, index = divmod(step, steps_per_epoch)
    rng = random.Random(f"{recipe.seed} {epoch}")
    order = rng.sample(sorted(sequences), len(sequences))
    groups = [
        order[i : i + BATCHES_PER_SORTED_GROUP * size]
        for i in range(0, steps_per_epoch * size, BATCHES_PER_SORTED_GROUP * size)
    ]
    sorted_numbers = [n for group in groups for n in sorted(group, key=lambda n: len(sequences[n]))]
    batches = [sorted_numbers[i : i + size] for i in range(0, steps_per_epoch * size, size)]
    return rng.sample(batches, len(batches))[index]
