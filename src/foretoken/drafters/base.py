"""The protocol of drafters: they make draft tokens for a batch of sequences, with the distributions
these were drawn from.

Rows are numbered by their place in the batch. `leave` closes the gaps: the rows behind move up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from foretoken.errors import InputError, RefusedError
from foretoken.models.base import Model, Shares
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


class Drafter(Protocol):
    """A maker of draft tokens: the approximation model M_q of the paper, in the widest sense.

    Any object with these methods is one. It holds the sequences of one engine: give each Speculator
    a drafter of its own. Sequences are numbered by their index in the batch; `leave` closes the
    gaps. The attributes that a drafter may have, and their defaults: docs/drafters.md, "Your own".

    Examples:
        >>> import foretoken
        >>> from foretoken.drafters.base import pack
        >>> class RepeatDrafter:
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
        >>> spec = foretoken.load(draft=RepeatDrafter())
        >>> (out,) = spec.generate("The captain looked", max_new_tokens=8, gamma=2)
        >>> out.text
        ' at the doctor, and the doctor said'
    """

    def start(
        self, rows: list[int], prompts: list[list[int]], sources: list[list[int]] | None
    ) -> None:
        """Add sequences behind those present.

        Args:
            rows: Their indices in the batch.
            prompts: Their prompts, in ids.
            sources: Their encoder inputs, for an encoder-decoder target; else None.
        """
        ...

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        """Make draft tokens.

        It may stop early after any draft token, but must not drop one that it has drawn.

        Args:
            gamma: The most draft tokens for each sequence.
            draw: The source of all chance in this step.

        Returns:
            At most gamma[b] draft tokens for sequence b.
        """
        ...

    def commit(self, tokens: list[list[int]]) -> None:
        """Append the step's tokens to the sequences.

        Args:
            tokens: For each sequence the accepted draft tokens, then the target's own token, which
                is missing where the sequence's controls leave none: it is finished.
        """
        ...

    def leave(self, rows: list[int]) -> None:
        """Drop finished sequences; those behind move up.

        Args:
            rows: Their indices in the batch.
        """
        ...


class Rewinding(Drafter, Protocol):
    """A drafter that can go back, as the parts of cascades and mixtures must."""

    def rewind(self, counts: list[int]) -> None:
        """Forget the last counts[b] tokens that row b committed, and all draft tokens behind
        them."""
        ...


class ReadsTarget(Drafter, Protocol):
    """A drafter that guesses from the states of its `target`'s passes."""

    reads_target: bool  # True
    target: Model

    def reading(self, target: Model) -> Drafter:
        """The same drafter for another target, without rows."""
        ...


def rewinding(drafter: Drafter, name: str) -> Rewinding:
    """`drafter`, a part of the drafter `name`; RefusedError where it cannot go back."""
    if not hasattr(drafter, "rewind"):
        raise RefusedError(
            f"{type(drafter).__name__} cannot go back, as the parts of {name} must; "
            "give it a method rewind(counts)"
        )
    return cast(Rewinding, drafter)


def reading(drafter: Drafter, target: Model) -> Drafter:
    """`drafter`, or where it reads the states of the target that it was made for, the same drafter
    for `target`. RefusedError where it cannot be given another target."""
    if not getattr(drafter, "reads_target", False):
        return drafter
    if not hasattr(drafter, "reading"):
        raise RefusedError(
            f"{type(drafter).__name__} reads the states of one target and cannot take another's; "
            "give it a method reading(target)"
        )
    return cast(ReadsTarget, drafter).reading(target)


def vocabulary(drafter: Drafter) -> int | None:
    """V of a drafter's distributions; None where it makes none or does not say."""
    return getattr(drafter, "vocab_size", None)


def runtime(drafter: Drafter) -> str:
    """Return the backend of a drafter's model, or "python"."""
    return getattr(drafter, "runtime", "python")


def require_vocabulary(drafter: Drafter, V: int, owner: str) -> None:
    """Raise InputError where a drafter's distributions are not over V tokens."""
    size = vocabulary(drafter)
    if size not in (None, V):
        raise InputError(
            f"{type(drafter).__name__} guesses among {size} tokens, {owner} has {V}; "
            "give a drafter of the same vocabulary"
        )


def require_apart(target: Model, drafter: Drafter) -> None:
    """Raise InputError where a model or a drafter would hold the rows of two places, or reads the
    states of another target than this one."""
    places = [*held(target), *held(drafter)]
    for i, part in enumerate(places):
        kind = type(part).__name__
        if any(part is other for other in places[:i]):
            raise InputError(
                f"one {kind} stands in two places of target and draft, whose rows it would mix up; "
                "make another for each"
            )
        if not getattr(part, "reads_target", False):
            continue
        read = getattr(part, "target", target)
        if isinstance(part, Shares):
            if all(read is not inner for inner in held(target)):  # what wraps it has its rows
                raise InputError(
                    "the draft is drafted for by a copy of itself, which cannot be in a cascade; "
                    "load it with draft='lookup', 'none' or a model"
                )
        elif read is not target:
            raise InputError(
                f"{kind} reads the states of another target, the one that it was loaded with; "
                "give draft='heads:FILE'"
            )


def held(part: object) -> Iterator[object]:
    """A model or drafter, and all models and drafters within it."""
    yield part
    for inner in getattr(part, "holds", ()):
        yield from held(inner)


def pack(draft_tokens: list[list[int]], q: Tensor | None = None, calls: int = 0) -> Draft:
    """A draft from ragged lists."""
    lengths = [len(g) for g in draft_tokens]
    G = max(lengths, default=0)
    padded = [[*g, *[0] * (G - len(g))] for g in draft_tokens]
    tokens = torch.tensor(padded, dtype=torch.long).reshape(len(draft_tokens), G)
    return Draft(tokens, torch.tensor(lengths, dtype=torch.long), q, calls)
