"""The base of drafters: they make draft tokens for a batch of sequences, with the distributions
these were drawn from.

Rows are numbered by their place in the batch. `leave` closes the gaps: the rows behind move up.
"""
# torch leaves the type of from_numpy() open
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
    """Draft tokens, and the very distributions they were drawn from.

    A draft token that was drawn from a distribution must come with that distribution: any other q
    makes the output wrong.

    Attributes:
        tokens: `[B, G]`, padded on the right; may stay on a device.
        lengths: `[B]`, at most the gamma asked for; on the host.
        q: `[B, G, V]`, V the target's vocabulary. None where each draft token was certain, a
            deterministic function of the text so far.
        calls: Forwards of a draft model that it took.
        tops: `[B, G]`, the largest logit at each draft token; not finite: invalid.
        predicted: Indices of the sequences whose draft tokens their own requests predict.

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
    """A maker of draft tokens: the approximation model M_q of the paper, in the widest sense.

    Derive yours from it: it has a default for all but the first four methods. A drafter holds the
    sequences of one engine: give each Speculator a drafter of its own. Sequences are numbered by
    their index in the batch; `leave` closes the gaps.

    Attributes:
        vocab_size: V of its distributions, which must be the target's; None where it makes none.
        runtime: Name of what it runs on, for statistics.
        model: The model that it drafts with: its cost is measured, and its forwards are padded;
            None where it has none.
        holds: Models and drafters within it, none of which may stand in two places.
        identity: A string that its speed follows from: costs measured for it are stored under it;
            None where it has none.
        has_own_speed: True if its speed does not follow from its `model`, so that costs are not
            stored.
        reads_target: True if it drafts from the states of the target's forwards, so that these
            cannot run ahead; `target` is then that target.
        shares: True if it drafts in the target's own KV cache.
        rewinds: True if it can go back, as the parts of cascades and mixtures must: where the class
            has a `rewind` of its own.
        reads_states: True if it reads the states that its `target` shows of all tokens: where the
            class has a `count_cached_tokens` of its own.
        priors: Prior beliefs about the acceptance of draft tokens, one for each of its
            `predict_grades`: acceptance is then learned grade by grade. Each is a weight in tokens
            and a rate.

    Examples:
        >>> import foretoken
        >>> from foretoken.drafters.base import pack
        >>> class RepeatDrafter(foretoken.Drafter):
        ...     "Repeats the last token."
        ...
        ...     def __init__(self):
        ...         self.texts = []
        ...
        ...     def start(self, rows, prompts, sources):
        ...         self.texts += [list(prompt) for prompt in prompts]
        ...
        ...     def propose(self, gamma, draw):
        ...         return pack([text[-1:] * g for text, g in zip(self.texts, gamma)])
        ...
        ...     def commit(self, tokens):
        ...         for text, new in zip(self.texts, tokens):
        ...             text += new
        ...
        ...     def leave(self, rows):
        ...         self.texts = [text for b, text in enumerate(self.texts) if b not in rows]
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

    def start(
        self, rows: list[int], prompts: list[list[int]], sources: list[list[int]] | None
    ) -> None:
        """Add sequences behind those present.

        Args:
            rows: Their indices in the batch.
            prompts: Their prompts, in ids.
            sources: Their encoder inputs, for an encoder-decoder target; else None.
        """
        raise NotImplementedError

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        """Make draft tokens.

        It may stop early after any draft token, but must not drop one that it has drawn.

        Args:
            gamma: The most draft tokens for each sequence.
            draw: The source of all chance in this step.

        Returns:
            At most gamma[b] draft tokens for sequence b.
        """
        raise NotImplementedError

    def commit(self, tokens: list[list[int]]) -> None:
        """Append the step's tokens to the sequences.

        Args:
            tokens: For each sequence the accepted draft tokens, then the target's own token, which
                is missing where the sequence's controls leave none: it is finished.
        """
        raise NotImplementedError

    def leave(self, rows: list[int]) -> None:
        """Drop finished sequences; those behind move up.

        Args:
            rows: Their indices in the batch.
        """
        raise NotImplementedError

    def rewind(self, counts: list[int]) -> None:
        """Go back: forget the last committed tokens, and all draft tokens behind them.

        Args:
            counts: How many tokens of each sequence.

        Raises:
            RefusedError: It cannot; by itself no drafter can.
        """
        raise RefusedError(f"{type(self).__name__} cannot go back; give it a method rewind(counts)")

    def with_target(self, target: Model) -> Any:
        """Return this drafter for another target, where it reads the states of one.

        Args:
            target: The other target, whose sequences the drafter begins without.

        Returns:
            The same drafter where it reads no target.

        Raises:
            RefusedError: It reads the states of one target alone.
        """
        if not self.reads_target:
            return self
        raise RefusedError(
            f"{type(self).__name__} reads the states of one target and cannot take another's; "
            "give it a method with_target(target)"
        )

    def count_cached_tokens(self, tokens: list[int]) -> int:
        """Count the first tokens of a sequence whose states the target need not show again.

        Args:
            tokens: The sequence.

        Returns:
            None of them, unless it reads the states that a target shows of all tokens.
        """
        return 0

    def predict_grades(self) -> list[int]:
        """Return, before it drafts, how far each sequence's next draft tokens are to be trusted.

        Returns:
            For each sequence an index into `priors`; not asked for where there are none.
        """
        return []


REQUIRED_METHODS = ("start", "propose", "commit", "leave")
OPTIONAL_ATTRIBUTES = (  # what else an object may have of a drafter
    *("vocab_size", "runtime", "model", "identity", "reads_target", "target", "shares"),
    *("rewind", "with_target", "count_cached_tokens", "set_prefix_caching", "set_salt"),
)


class DrafterAdapter(Drafter):
    """An object with the four methods that a drafter must have, and defaults of what it lacks."""

    has_own_speed = True  # its speed is the object's, not that of this class

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
    """Return `value` as a drafter: itself, or with what it lacks beside the four methods. Raises
    InputError for anything else."""
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
    """Return `value`, a part of the drafter `name`, as a drafter. Raises InputError where it is
    none, RefusedError where it cannot go back."""
    drafter = require_drafter(value)
    if not drafter.rewinds:
        raise RefusedError(
            f"{type(drafter).__name__} cannot go back, as the parts of {name} must; "
            "give it a method rewind(counts)"
        )
    return drafter


def require_vocabulary(drafter: Drafter, V: int, owner: str) -> None:
    """Raise InputError where a drafter's distributions are not over V tokens."""
    if drafter.vocab_size not in (None, V):
        raise InputError(
            f"{type(drafter).__name__} guesses among {drafter.vocab_size} tokens, {owner} has {V}; "
            "give a drafter of the same vocabulary"
        )


def require_separate_parts(target: Model, drafter: Drafter) -> None:
    """Raise InputError where a model or a drafter would hold the rows of two places, or reads the
    states of another target than this one, RefusedError where it reads those of a guided one."""
    places = [*iter_parts(target), *iter_parts(drafter)]
    for i, part in enumerate(places):
        kind = type(part).__name__
        if any(part is other for other in places[:i]):
            raise InputError(
                f"one {kind} stands in two places of target and draft, whose rows it would mix up; "
                "make another for each"
            )
        if not isinstance(part, Component) or not part.reads_target or part.target is None:
            continue
        if isinstance(target, GuidedModel):
            raise RefusedError(
                f"{kind} reads the target's rows, of which guidance has two for each text; give "
                "'lookup', a table or a model of its own"
            )
        read = part.target
        if part.capabilities.target_rows:
            if all(read is not inner for inner in iter_parts(target)):  # what wraps it has its rows
                raise InputError(
                    "the draft is drafted for by a copy of itself, which cannot be in a cascade; "
                    "load it with draft='lookup', 'none' or a model"
                )
        elif read is not target:
            raise InputError(
                f"{kind} reads the states of another target, the one that it was loaded with; "
                "load it with this one"
            )


def iter_parts(part: object) -> Iterator[object]:
    """Yield a model or drafter, and all models and drafters within it."""
    yield part
    for inner in part.holds if isinstance(part, Component) else ():
        yield from iter_parts(inner)


def list_parts(*owners: object) -> list[Component]:
    """Return these models and drafters, and all within them."""
    return [part for owner in owners for part in iter_parts(owner) if isinstance(part, Component)]


def require_rewind(gamma: int, *owners: object) -> None:
    """Raise InputError for more draft tokens than the models among these, or within them, go back
    by."""
    for model in list_parts(*owners):
        if isinstance(model, Model) and model.max_rewind is not None and gamma >= model.max_rewind:
            raise InputError(
                f"gamma is {format_value(gamma)}, but the model's states go back by "
                f"{model.max_rewind} "
                "tokens; give less"
            )


def pack(draft_tokens: list[list[int]], q: Tensor | None = None, calls: int = 0) -> Draft:
    """A draft from ragged lists."""
    if q is None and not calls and not any(draft_tokens):
        return _make_empty_draft(len(draft_tokens))
    lengths = [len(g) for g in draft_tokens]
    G = max(lengths, default=0)
    padded = [[*g, *[0] * (G - len(g))] for g in draft_tokens]
    tokens = torch.from_numpy(np.array(padded, np.int64).reshape(len(draft_tokens), G))
    return Draft(tokens, _to_tensor(lengths), q, calls)


@lru_cache(maxsize=64)
def _make_empty_draft(batch_size: int) -> Draft:
    """No draft tokens, as in every step of plain decoding."""
    with torch.inference_mode(False):  # they outlive the step that makes them
        tokens, lengths = (
            torch.from_numpy(np.zeros(shape, np.int64)) for shape in ((batch_size, 0), batch_size)
        )
    return Draft(tokens, lengths)


def pack_certain(tokens: list[list[int]], tops: list[list[float]], calls: int) -> Draft:
    """A draft of the likeliest tokens, from ragged lists of them and of the logits there."""
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
    """Draw token i as `draw.sample` does, from logits `[B, Vd]` over some of a target's V ids:
    controls and noise that is shared speak of all of them, all else takes less time over Vd.

    ids: the target's ids that the draft's outputs stand for, `[Vd]`; None: their numbers.
    """
    if draw.controlled or draw.coupled:
        return draw.sample(widen(logits, ids, V), i, params)
    tokens, q = draw.sample(logits, i, params)
    tokens = tokens if ids is None else ids[tokens]
    return tokens, None if q is None else widen(q, ids, V, missing=0.0)


def make_token_choice(
    draw: Draw, G: int, V: int, ids: Tensor | None = None, params: SamplingParams | None = None
) -> TokenChoice | None:
    """Return how a model that makes all draft tokens in one call is to choose them; None where
    sequences differ, or their controls or shared noise have to be looked at.

    V, ids, params: as `draw_token` takes them; G: draft tokens at most.
    """
    if draw.controlled or draw.coupled:
        return None
    rules = draw.params if params is None else [params] * len(draw.params)
    if all(each.greedy for each in rules):
        return TokenChoice(V, ids)
    first = rules[0].standard
    if first[4:] != EXTRA_WARPERS_OFF or any(
        each.greedy or each.standard != first for each in rules
    ):
        return None
    return TokenChoice(V, ids, first[:4], draw.draft_numbers(G))


def pack_chained(chain: ChainedTokens, lengths: list[int], calls: int, draw: Draw) -> Draft:
    """Return the draft of tokens that were made in one call, of which draw then knows the masses of
    what they were drawn from."""
    draw.masses += [] if chain.q is None else chain.masses.unbind(1)
    tops = None if is_known_finite(chain.tops) else chain.tops
    return Draft(chain.tokens, _to_tensor(lengths), chain.q, calls, tops)


def _to_tensor(numbers: list[int]) -> Tensor:
    """Return them as a tensor, in NumPy's way, which takes a third of torch's own."""
    return torch.from_numpy(np.array(numbers, np.int64))


def widen(scores: Tensor, ids: Tensor | None, V: int, *, missing: float = -math.inf) -> Tensor:
    """Logits, or probabilities, `[B, Vd]` over all V ids of a target, with `missing` at those that
    a draft lacks.

    ids: as `draw_token` takes them.
    """
    if ids is None and scores.shape[-1] == V:
        return scores
    wide = scores.new_full((len(scores), V), missing)
    if ids is None:
        wide[:, : scores.shape[-1]] = scores[:, :V]
    else:
        wide[:, ids] = scores
    return wide
