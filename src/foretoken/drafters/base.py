"""The base class of drafters, the `Draft` that they return, and functions that build a `Draft`.

A drafter identifies each sequence by its row, the index of the sequence in the batch. When
sequences leave the batch, later sequences move up.
"""
# torch does not annotate from_numpy()
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.errors import InputError, RefusedError, format_value
from foretoken.models.base import ChainedTokens, Component, Model, TokenChoice
from foretoken.models.guidance import GuidedModel
from foretoken.sampling.distributions import EXTRA_WARPERS_OFF, SamplingParams, is_known_finite
from foretoken.sampling.draw import Draw


@dataclass(frozen=True, slots=True)
class Draft:
    """The draft tokens of one step, and the distributions that they were sampled from.

    A sampled draft token must come with exactly the distribution that it was sampled from: with any
    other q, the output does not follow the target's distribution.

    Attributes:
        tokens: `[B, G]`, padded on the right; may be on a GPU.
        lengths: `[B]`, the number of draft tokens of each sequence, at most its gamma; on the CPU.
        q: `[B, G, V]`; V is the target's vocabulary size. None if every draft token is certain,
            that is, a deterministic function of the tokens before it.
        calls: Forward passes of the draft model.
        tops: `[B, G]`, for each draft token the largest of the logits from which it was chosen. A
            non-finite value marks invalid logits.
        predicted: Rows whose draft tokens come from a request's prediction, not from the drafter.
            The drafter's acceptance is estimated without these rows.

    Examples:
        >>> import foretoken, torch
        >>> draft = foretoken.Draft(tokens=torch.tensor([[7, 7]]), lengths=torch.tensor([2]))
        >>> draft.q is None
        True
    """

    tokens: Tensor
    lengths: Tensor
    q: Tensor | None = None
    calls: int = 0
    tops: Tensor | None = None
    predicted: frozenset[int] = frozenset()


class Drafter(Component):
    """An object that proposes draft tokens: the approximation model M_q of the paper.

    To write a drafter, derive from this class: `start`, `propose`, `commit` and `leave` are
    required, everything else has a default. A drafter holds the sequences of one engine, so give
    each Speculator a drafter of its own. Each sequence is identified by its row, the index of the
    sequence in the batch; when sequences leave, later sequences move up.

    Attributes:
        vocab_size: V of its distributions, equal to the target's; None if it returns no
            distributions.
        runtime: Name of its backend, for statistics.
        model: The draft model; its cost is measured and its forward passes are padded. None if the
            drafter has no model.
        holds: Models and drafters that this drafter contains. No other part of the target or the
            drafter may contain them.
        identity: Key under which its measured costs are stored; None if they are not stored.
        has_own_speed: True if its speed does not follow from its `model`. Its costs are then not
            stored.
        reads_target: True if it drafts from the hidden states of its `target`. The target's forward
            passes then cannot run ahead of the drafter.
        shares: True if it drafts in the target's own KV cache.
        rewinds: True if the class overrides `rewind`. A drafter that is part of a cascade or a
            mixture must override `rewind`.
        reads_states: True if it needs the hidden states of all tokens from its `target`. Its class
            then overrides `count_cached_tokens`.
        priors: Prior acceptance of each grade that `predict_grades` returns: a weight in tokens and
            an acceptance rate. If given, acceptance is estimated for each grade separately.

    Examples:
        >>> import foretoken
        >>> from foretoken.drafters.base import pack
        >>> class RepeatDrafter(foretoken.Drafter):
        ...     "Repeats the last token."
        ...
        ...     def __init__(self):
        ...         self.sequences = []
        ...
        ...     def start(self, rows, prompts, sources):
        ...         self.sequences += [list(prompt) for prompt in prompts]
        ...
        ...     def propose(self, gamma, draw):
        ...         return pack([seq[-1:] * g for seq, g in zip(self.sequences, gamma)])
        ...
        ...     def commit(self, tokens):
        ...         for seq, new in zip(self.sequences, tokens):
        ...             seq += new
        ...
        ...     def leave(self, rows):
        ...         self.sequences = [s for b, s in enumerate(self.sequences) if b not in rows]
        >>> spec = foretoken.load("novels", draft=RepeatDrafter())
        >>> (out,) = spec.generate("The captain looked", max_new_tokens=8, gamma=2)
        >>> out.text
        ' at the doctor, and the doctor said'
    """

    vocab_size: int | None = None
    runtime: str = "python"
    shares: bool = False
    priors: tuple[tuple[float, float], ...] = ()

    @property
    def rewinds(self) -> bool:
        return type(self).rewind is not Drafter.rewind

    @property
    def reads_states(self) -> bool:
        return type(self).count_cached_tokens is not Drafter.count_cached_tokens

    def set_output_lengths(self, lengths: list[int]) -> None:
        """Set how many tokens at the end of each prompt of the next `start` are output tokens. Only
        sequences that join again after a preemption have such tokens. Drafters that treat prompts
        and outputs differently use these numbers.

        Args:
            lengths: The number of output tokens of each sequence.
        """
        for part in self.holds:
            if isinstance(part, Drafter):
                part.set_output_lengths(lengths)

    def start(
        self, rows: list[int], prompts: list[list[int]], sources: list[list[int]] | None
    ) -> None:
        """Add sequences to the end of the batch.

        Args:
            rows: The sequences' indices in the batch.
            prompts: The prompt of each sequence, as token ids; its prompt and its output if it
                joins again.
            sources: The encoder input of each sequence, as token ids, for an encoder-decoder
                target; else None.
        """
        raise NotImplementedError

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        """Propose draft tokens for every sequence.

        The drafter may propose fewer than gamma tokens, but must not drop a token that it has
        sampled: that would change the token's distribution.

        Args:
            gamma: Maximum number of draft tokens for each sequence.
            draw: The random numbers of this step. The drafter must not use other random numbers.

        Returns:
            At most gamma[b] draft tokens for sequence b.
        """
        raise NotImplementedError

    def commit(self, tokens: list[list[int]]) -> None:
        """Append the new tokens of a step to the sequences.

        Args:
            tokens: For each sequence the accepted draft tokens, then the target's own token. The
                target's token is missing if the sequence failed because its controls allow no
                token.
        """
        raise NotImplementedError

    def leave(self, rows: list[int]) -> None:
        """Remove finished sequences; later sequences move up.

        Args:
            rows: The finished sequences' indices in the batch.
        """
        raise NotImplementedError

    def rewind(self, counts: list[int]) -> None:
        """Remove from each sequence all draft tokens, then the last committed tokens.

        Args:
            counts: Number of committed tokens to remove from each sequence.

        Raises:
            RefusedError: The class does not override this method.
        """
        raise RefusedError(f"{type(self).__name__} cannot rewind; define a method rewind(counts)")

    def with_target(self, target: Model) -> Any:
        """Return this drafter for another target.

        Args:
            target: The other target.

        Returns:
            A new drafter without sequences, or this drafter if it does not use a target.

        Raises:
            RefusedError: The drafter uses the hidden states of its target, and its class does not
                override this method.
        """
        if not self.reads_target:
            return self
        raise RefusedError(
            f"{type(self).__name__} drafts from the hidden states of one target and cannot switch "
            "to another; define a method with_target(target)"
        )

    def count_cached_tokens(self, tokens: list[int]) -> int:
        """Return how many tokens at the start of a sequence need no hidden states from the target.

        Args:
            tokens: The sequence, as token ids.

        Returns:
            The number of these tokens; the drafter has their hidden states already. 0 by default.
        """
        return 0

    def predict_grades(self) -> list[int]:
        """Predict how likely the next draft tokens of each sequence are to be accepted.

        Returns:
            For each sequence an index into `priors`. The method is not called if `priors` is empty.
        """
        return []


GREEDY_FILTERS = (1.0, 1, 1.0, 0.0)  # top-k of 1, for a greedy sequence among sampled ones
REQUIRED_METHODS = ("start", "propose", "commit", "leave")
OPTIONAL_ATTRIBUTES = (  # `DrafterAdapter` copies them from its object, if the object has them
    *("vocab_size", "runtime", "model", "identity", "reads_target", "target", "shares"),
    *("rewind", "with_target", "count_cached_tokens", "set_prefix_caching", "set_salt"),
)


class DrafterAdapter(Drafter):
    """A drafter around an object that has the four required methods but is not a Drafter."""

    has_own_speed = True  # the speed depends on the object

    def __init__(self, own: Any) -> None:
        self.own = own
        given = (name for name in OPTIONAL_ATTRIBUTES if hasattr(own, name))
        vars(self).update({name: getattr(own, name) for name in (*REQUIRED_METHODS, *given)})
        self.holds = (own, *getattr(own, "holds", ()))

    @property
    def rewinds(self) -> bool:
        return "rewind" in vars(self)

    @property
    def reads_states(self) -> bool:
        return self.reads_target and "count_cached_tokens" in vars(self)


def require_drafter(value: object) -> Drafter:
    """Return `value` if it is a Drafter, or an adapter around `value` if it has the four required
    methods of a drafter. Raises InputError for anything else."""
    kind = type(value)
    if isinstance(value, type) or not hasattr(value, "propose"):
        raise InputError(f"draft is {value!r:.60}; give a folder, a name, a model or a Drafter")
    lacking = [
        name
        for name in REQUIRED_METHODS
        if not callable(method := getattr(value, name, None))
        or getattr(method, "__func__", None) is getattr(Drafter, name)
    ]
    if lacking:
        raise InputError(
            f"{kind.__name__} lacks {' and '.join(lacking)}; a drafter has the methods "
            f"{', '.join(REQUIRED_METHODS)}"
        )
    if isinstance(value, Drafter):
        return value
    return type(kind.__name__, (DrafterAdapter,), {})(value)  # messages name the object's class


def require_rewindable(value: object, name: str) -> Drafter:
    """Return `value` as a drafter that can be part of another drafter, which messages call `name`.
    Raises InputError if `value` is not a drafter, RefusedError if it cannot rewind."""
    drafter = require_drafter(value)
    if not drafter.rewinds:
        raise RefusedError(
            f"{type(drafter).__name__} cannot rewind, but the parts of {name} must be able to "
            "rewind; define a method rewind(counts)"
        )
    return drafter


def require_vocabulary(drafter: Drafter, V: int, owner: str) -> None:
    """Raise InputError if a drafter returns distributions over more or fewer than V tokens. `owner`
    names, in the message, the model or drafter with V tokens."""
    if drafter.vocab_size not in (None, V):
        raise InputError(
            f"{type(drafter).__name__} has a vocabulary of {drafter.vocab_size} tokens, but "
            f"{owner} has {V}; give a drafter with the same vocabulary"
        )


def require_separate_parts(target: Model, drafter: Drafter) -> None:
    """Check that target and drafter can be used together.

    Raises InputError if they contain the same model or drafter twice, or if a part of them drafts
    from the hidden states of another target. Raises RefusedError if a part would draft from the
    hidden states of a target under guidance.
    """
    places = [*iter_parts(target), *iter_parts(drafter)]
    for i, part in enumerate(places):
        kind = type(part).__name__
        if any(part is other for other in places[:i]):
            raise InputError(
                f"one {kind} is used in two places of target and draft, and would mix up the "
                "sequences of the two places; make another object for each place"
            )
        if not isinstance(part, Component) or not part.reads_target or part.target is None:
            continue
        if isinstance(target, GuidedModel):
            raise RefusedError(
                f"{kind} cannot be used with guidance, because it drafts from the target's cache, "
                "which then has two rows for each sequence; give draft='lookup', a table or a "
                "separate model"
            )
        read = part.target
        if part.capabilities.target_rows:
            # the target may be inside a wrapper, which uses the target's rows
            if all(read is not inner for inner in iter_parts(target)):
                raise InputError(
                    "a draft model that has a copy of itself as drafter cannot be in a cascade; "
                    "load the draft model with draft='lookup', 'none' or a model"
                )
        elif read is not target:
            raise InputError(
                f"{kind} drafts from the hidden states of another target, with which it was "
                f"loaded; load {kind} with this target"
            )


def iter_parts(part: object) -> Iterator[object]:
    """Yield a model or drafter, and all models and drafters that it contains."""
    yield part
    for inner in part.holds if isinstance(part, Component) else ():
        yield from iter_parts(inner)


def list_parts(*owners: object) -> list[Component]:
    """Return these models and drafters, and all that they contain."""
    return [part for owner in owners for part in iter_parts(owner) if isinstance(part, Component)]


def require_rewind(gamma: int, *owners: object) -> None:
    """Raise InputError if gamma is not below the number of tokens that a model can roll back.
    Checks the models among `owners` and all models that the owners contain."""
    for model in list_parts(*owners):
        if isinstance(model, Model) and model.max_rewind is not None and gamma >= model.max_rewind:
            raise InputError(
                f"gamma is {format_value(gamma)}, but the model can roll back only "
                f"{model.max_rewind} tokens; give a gamma below {model.max_rewind}"
            )


def pack(draft_tokens: list[list[int]], q: Tensor | None = None, calls: int = 0) -> Draft:
    """Return a `Draft` of these draft tokens, given as one list per sequence. For q and calls see
    `Draft`."""
    if q is None and not calls and not any(draft_tokens):
        return _make_empty_draft(len(draft_tokens))
    lengths = [len(g) for g in draft_tokens]
    G = max(lengths, default=0)
    padded = [[*g, *[0] * (G - len(g))] for g in draft_tokens]
    tokens = torch.from_numpy(np.array(padded, np.int64).reshape(len(draft_tokens), G))
    return Draft(tokens, _to_tensor(lengths), q, calls)


@lru_cache(maxsize=64)
def _make_empty_draft(batch_size: int) -> Draft:
    """Return a draft without tokens, cached because every step of plain decoding needs one."""
    with torch.inference_mode(False):  # the tensors outlive the step that creates them
        tokens, lengths = (
            torch.from_numpy(np.zeros(shape, np.int64)) for shape in ((batch_size, 0), batch_size)
        )
    return Draft(tokens, lengths)


def pack_certain(tokens: list[list[int]], tops: list[list[float]], calls: int) -> Draft:
    """Return a `Draft` of most probable tokens. For each sequence, `tokens` has the ids of the
    draft tokens, and `tops` has their logits."""
    draft = pack(tokens, calls=calls)
    if all(map(math.isfinite, chain.from_iterable(tops))):
        return draft
    G = max(map(len, tops))
    return replace(draft, tops=torch.tensor([[*row, *[0.0] * (G - len(row))] for row in tops]))


def draw_token(
    draw: Draw,
    logits: Tensor,
    i: int,
    ids: Tensor | None,
    V: int,
    params: SamplingParams | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Sample draft token i as `draw.sample` does, from logits `[B, Vd]` that may cover only some of
    the target's V ids. Returns tokens `[B]` and q `[B, V]`; q is None if the tokens are certain.

    ids: the target id of each draft logit, `[Vd]`; None if the logits are those of the first Vd
    ids.
    """
    # controls and shared noise are defined over all V ids; everything else is faster over Vd
    if draw.controlled or draw.coupled:
        return draw.sample(widen(logits, ids, V), i, params)
    tokens, q = draw.sample(logits, i, params)
    tokens = tokens if ids is None else ids[tokens]
    return tokens, None if q is None else widen(q, ids, V, missing=0.0)


def make_token_choice(
    draw: Draw,
    G: int,
    V: int,
    ids: Tensor | None = None,
    params: SamplingParams | None = None,
    *,
    mixed: bool = False,
) -> TokenChoice | None:
    """Return the rule by which a model chooses draft tokens if it makes all of them in one call.
    Returns None if one call is impossible because sequences differ in their sampling params, have
    controls or use shared noise.

    V, ids, params: as in `draw_token`; G: maximum number of draft tokens; mixed: True if sequences
    may differ in their sampling params.
    """
    if draw.controlled or draw.coupled:
        return None
    rules = draw.params if params is None else [params] * len(draw.params)
    if all(each.greedy for each in rules):
        return TokenChoice(V, ids)
    sampled = [each.standard for each in rules if not each.greedy]
    if any(standard[4:] != EXTRA_WARPERS_OFF for standard in sampled):
        return None
    filters = [GREEDY_FILTERS if each.greedy else each.standard[:4] for each in rules]
    if not mixed and (len(sampled) < len(rules) or len({*filters}) > 1):
        return None
    return TokenChoice(V, ids, filters, draw.draw_draft_numbers(G))


def pack_chained(chain: ChainedTokens, lengths: list[int], calls: int, draw: Draw) -> Draft:
    """Return a `Draft` of the tokens that one call of a model made, `lengths[b]` tokens in sequence
    b. Also add the masses of the tokens' distributions to `draw`."""
    draw.masses += [] if chain.q is None else chain.masses.unbind(1)
    tops = None if is_known_finite(chain.tops) else chain.tops
    return Draft(chain.tokens, _to_tensor(lengths), chain.q, calls, tops)


def _to_tensor(numbers: list[int]) -> Tensor:
    """Return an int64 tensor of these numbers. NumPy takes a third of the time of
    `torch.tensor`."""
    return torch.from_numpy(np.array(numbers, np.int64))


def widen(scores: Tensor, ids: Tensor | None, V: int, *, missing: float = -math.inf) -> Tensor:
    """Return logits or probabilities `[B, Vd]` as `[B, V]` over the target's ids, with the value
    `missing` at ids that the draft model does not have.

    ids: as in `draw_token`.
    """
    if ids is None and scores.shape[-1] == V:
        return scores
    wide = scores.new_full((len(scores), V), missing)
    if ids is None:
        wide[:, : scores.shape[-1]] = scores[:, :V]
    else:
        wide[:, ids] = scores
    return wide
