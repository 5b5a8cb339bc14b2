"""Train an EAGLE-3 draft (arXiv 2503.01840) on a frozen target: `foretoken train eagle`.

The draft is unrolled over several depths, as it will be used: at the first it reads the target's
states, at each further one its own of the depth before, and learns the target's distribution at
every one. Tokens are the text's. The target's states are computed once and kept on disk.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, LlamaConfig, PreTrainedModel

from foretoken.errors import InputError
from foretoken.models.stock.pair_files import eagle_network, usual_taps
from foretoken.models.stock.pairs import PairsNetwork
from foretoken.storage import files
from foretoken.train.corpus import Examples
from foretoken.train.distill import LEAST, LOSSES
from foretoken.train.kept_states import KeptTexts, TextStates
from foretoken.train.loop import Loop, TrainingRecipe, folder_of_run, require_positive
from foretoken.train.pair import fingerprint

ROWS = 128  # places whose distributions are made at a time
NEAR = 16  # batches whose texts are sorted by length, so that little is padded

# step, loss, and alpha at each depth where it is measured
Report = Callable[[int, float, list[float] | None], None]


@dataclass(frozen=True, slots=True)
class EagleLesson:
    """The draft's size, and how it is taught."""

    draft_vocab: int = 8192  # the most frequent tokens of the texts
    intermediate: int | None = None  # width of its MLP; None: the target's
    depths: int = 4
    decay: float = 0.8  # weight of each depth, by that of the one before
    loss: str = "lk"

    def __post_init__(self) -> None:
        for name in ("draft_vocab", "depths"):
            require_positive(name, getattr(self, name))
        if self.intermediate is not None:
            require_positive("intermediate", self.intermediate)
        if not 0 < self.decay <= 1:
            raise InputError(f"decay is {self.decay}; give a number in (0, 1]")
        if self.loss not in LOSSES:
            raise InputError(f"loss is {self.loss!r}; give one of {', '.join(LOSSES)}")


def train_eagle(
    target: PreTrainedModel,
    examples: Examples,
    out: Path,
    lesson: EagleLesson,
    recipe: TrainingRecipe,
    report: Report,
    *,
    most: int,
    computed: Callable[[int], None],
) -> dict[str, Any]:
    """Train a draft on texts until `recipe.steps` and write it to the folder `out`; returns the
    summary. computed: is told of how many texts the target's states are there.

    The folder `out`.run holds the target's states, in `most` bytes at most, checkpoint and log. It
    is resumed with the result of an unbroken run. Raises InputError where it is another run's.
    """
    if out.is_file():
        raise InputError(f"{out} is a file; give another --out, for a folder")
    folder = folder_of_run(out.with_name(f"{out.name}.run"))
    text = target.config.get_text_config(decoder=True)
    taps = usual_taps(text.num_hidden_layers)
    texts = KeptTexts(folder / "states", target, taps, most, bfloat16=recipe.bfloat16)
    learnt, held_out = texts.make(examples, computed)
    ids = frequent(learnt, lesson.draft_vocab)
    network = fresh(target, len(ids), lesson, recipe.seed)
    student = Student(network, ids, target, bfloat16=recipe.bfloat16)
    settings = {**asdict(lesson), "target": fingerprint(target), "data": examples.digest}
    loop = Loop(folder, student.network, recipe, settings | {"states": most})

    def loss_at(step: int) -> Tensor:
        some = [texts.read(i) for i in batch_at(learnt, recipe, step)]
        weights = [lesson.decay**k for k in range(lesson.depths)]
        losses = [
            w * student.mean(LOSSES[lesson.loss], taught)
            for w, taught in zip(weights, student.depths(some, lesson.depths), strict=True)
        ]
        return torch.stack(losses).sum() / sum(weights)

    measured = None
    for loss in loop.losses(loss_at):
        measured = None
        if loop.due:
            measured = student.alpha(texts, held_out, lesson.depths, recipe.batch)
            loop.rank(sum(measured))
            loop.save(loss=loss, **{f"alpha_{k}": x for k, x in enumerate(measured, 1)})
        report(loop.step, loss, measured)
    student.network.load_state_dict(loop.best["weights"])
    measured = student.alpha(texts, held_out, lesson.depths, recipe.batch)
    student.save(out, taps, target)
    return {
        "draft_vocab": len(ids),
        "parameters": sum(x.numel() for x in student.network.parameters() if x.requires_grad),
        "texts": len(learnt),
        "tokens": sum(len(ids) for ids in learnt.values()),
        "steps": loop.step,
        "best_step": loop.best["step"],
        "alpha": measured,
        "seconds": loop.seconds,
    }


def frequent(texts: dict[int, list[int]], count: int) -> Tensor:
    """The most frequent tokens of texts, ascending."""
    counts = Counter(token for ids in texts.values() for token in ids)
    return torch.tensor(sorted(token for token, _ in counts.most_common(count)))


def batch_at(texts: dict[int, list[int]], recipe: TrainingRecipe, step: int) -> list[int]:
    """Numbers of the texts of a step's batch: each once an epoch, with others as long."""
    size = min(recipe.batch, len(texts))
    steps = len(texts) // size  # of an epoch
    epoch, at = divmod(step, steps)
    dice = random.Random(f"{recipe.seed} {epoch}")
    order = dice.sample(sorted(texts), len(texts))
    groups = [order[i : i + NEAR * size] for i in range(0, steps * size, NEAR * size)]
    near = [n for group in groups for n in sorted(group, key=lambda n: len(texts[n]))]
    batches = [near[i : i + size] for i in range(0, steps * size, size)]
    return dice.sample(batches, len(batches))[at]


def fresh(target: PreTrainedModel, rows: int, lesson: EagleLesson, seed: int) -> PairsNetwork:
    """A random draft of the target's widths, of Llama's parts, which other readers know."""
    text: Any = target.config.get_text_config(decoder=True)
    same = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    sizes = {name: getattr(text, name) for name in same if getattr(text, name, None)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LlamaConfig(
            **sizes,
            intermediate_size=lesson.intermediate or text.intermediate_size,
            rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
            max_position_embeddings=text.max_position_embeddings,
            rope_parameters=text.rope_parameters,
            num_hidden_layers=1,
            vocab_size=text.vocab_size,
        )
        return eagle_network(config, {"norm_before_residual": True}, rows, text.hidden_size, 3)


class Taught(NamedTuple):
    """Places `[N]` of texts where the draft learns: the normed states of its own, the target's that
    its output layer reads, both `[N, H]`, and the log mass of its logits."""

    states: Tensor
    hidden: Tensor
    mass: Tensor


class Student:
    """A draft in training. Its output layer has the target's rows, and is not trained: so a large
    vocabulary costs no weights of its own."""

    def __init__(
        self, network: PairsNetwork, ids: Tensor, target: PreTrainedModel, *, bfloat16: bool = False
    ) -> None:
        self.network, self.ids = network.requires_grad_(True), ids
        head: Any = network.head
        output: Any = target.get_output_embeddings()
        rows = output.weight.detach()[ids].float()
        head.linear.weight = nn.Parameter(rows, requires_grad=False)
        self.rows = rows.bfloat16() if bfloat16 else rows
        self.embedding: Any = target.get_input_embeddings()

    def depths(self, texts: list[TextStates], depths: int) -> Iterator[Taught]:
        """Run the draft over texts, depth by depth, and return its states at their new tokens.

        At depth k (from 0) place i has read the states up to token i, and the tokens up to i + k +
        1; it learns the target's distribution behind these.
        """
        network: Any = self.network
        ids = pad_sequence([t.ids for t in texts], batch_first=True)
        lengths = torch.tensor([len(t.ids) for t in texts])[:, None]
        prompts = torch.tensor([t.prompt for t in texts])[:, None]
        states = network.join(pad_sequence([t.taps for t in texts], batch_first=True).float())[
            :, :-1
        ]
        embedded = self.embedding(ids).detach()
        hidden = pad_sequence([t.hidden for t in texts], batch_first=True)
        masses = pad_sequence([t.mass for t in texts], batch_first=True)
        M = ids.shape[1] - 1
        cache, places = DynamicCache(), torch.arange(M)
        causal, own = places[:, None] >= places, torch.eye(M, dtype=torch.bool)
        for k in range(depths):
            read = nn.functional.pad(embedded[:, k + 1 :], (0, 0, 0, k))
            mask = torch.cat([causal, *[own] * k], 1)[None, None]
            positions = (places + k)[None]
            given: dict[str, Any] = {
                "attention_mask": mask,
                "position_ids": positions,
                "past_key_values": cache,
                "position_embeddings": network.rotary(states, position_ids=positions),
            }
            states = network.fed_back(read, states, {"full_attention": given})
            behind = places + k + 1  # the token whose next one is learnt
            taught = (behind < lengths) & (behind + 1 >= prompts)
            at = torch.where(taught, behind, 0)
            row = torch.arange(len(at))[:, None].expand_as(at)[taught], at[taught]
            yield Taught(network.head.norm(states[taught]), hidden[row], masses[row])

    def compared(self, states: Tensor, hidden: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logarithms of the target's distributions p and the draft's q, over the draft's
        tokens, `[N, Vd]`; p as it is among all tokens."""
        rows = self.rows
        p = (hidden.to(rows.dtype) @ rows.T).float() - mass[:, None]
        q = (states.to(rows.dtype) @ rows.T).float().log_softmax(-1)
        return p.clamp(min=LEAST), q.clamp(min=LEAST)

    def mean(self, loss: Callable[[Tensor, Tensor], Tensor], taught: Taught) -> Tensor:
        """Return the mean loss at the places, from a few at a time: no array is wide as the
        vocabulary and long as a batch, and slopes are of rows that are still in the processor's
        cache."""

        def total(*some: Tensor) -> Tensor:
            return loss(*self.compared(*some)).sum()

        parts = zip(*(x.split(ROWS) for x in taught), strict=True)
        sums = [checkpoint(total, *some, use_reentrant=False) for some in parts]
        return torch.stack(cast(list[Tensor], sums)).sum() / max(1, len(taught.mass))

    @torch.no_grad()
    def alpha(
        self, texts: KeptTexts, numbers: dict[int, list[int]], depths: int, batch: int
    ) -> list[float]:
        """Return alpha at each depth, the mean of sum min(p, q) (Corollary 3.6)."""
        totals, counts = [0.0] * depths, [0] * depths
        order = sorted(numbers, key=lambda n: len(numbers[n]))
        for i in range(0, len(order), batch):
            some = [texts.read(n) for n in order[i : i + batch]]
            for k, taught in enumerate(self.depths(some, depths)):
                for part in zip(*(x.split(ROWS) for x in taught), strict=True):
                    totals[k] += float(torch.minimum(*self.compared(*part)).exp().sum())
                counts[k] += len(taught.mass)
        return [total / max(1, n) for total, n in zip(totals, counts, strict=True)]

    def save(self, out: Path, taps: tuple[int, ...], target: PreTrainedModel) -> None:
        """Write the draft in speculators' format, whole or not at all."""
        V = target.config.get_text_config(decoder=True).vocab_size
        known = torch.zeros(V, dtype=torch.bool)
        known[self.ids] = True
        tensors = {_stored(name): w for name, w in self.network.state_dict().items()}
        tensors |= {"d2t": self.ids - torch.arange(len(self.ids)), "t2d": known}
        layers = self.network.config.to_diff_dict() | {"vocab_size": V, "model_type": "llama"}
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.5.0",
            "draft_vocab_size": len(self.ids),
            "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": list(taps),
            "transformer_layer_config": layers,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {
                    "name_or_path": target.name_or_path,
                    "architectures": target.config.architectures or [type(target).__name__],
                },
            },
        }
        with files.folder(out) as part:
            (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            kept = {name: x.detach().contiguous() for name, x in tensors.items()}
            (part / "model.safetensors").write_bytes(save(kept, {"format": "pt"}))


def _stored(name: str) -> str:
    """The name in speculators' layout of a weight of the network."""
    own = {
        "first.": "layers.0.",
        "head.norm.": "norm.",
        "head.linear.": "lm_head.",
        "join.fc.": "fc.",
    }
    return next(new + name[len(old) :] for old, new in own.items() if name.startswith(old))
