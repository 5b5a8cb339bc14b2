"""Checks of a call's prompts, seeds and speculation options, whatever the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from secrets import randbits
from typing import TYPE_CHECKING, Any, Protocol, cast

from foretoken.errors import InputError, shown, whole
from foretoken.media import TEXT
from foretoken.sampling import verifier
from foretoken.sampling.checks import SEED
from foretoken.sampling.keys import RowKey
from foretoken.sampling.speculation import COUPLED, SpeculationOptions

if TYPE_CHECKING:
    from foretoken.sampling.verifier import Verifier
    from foretoken.sampling.verify import Rule


class Listed(Protocol):
    """A tensor or an array."""

    def tolist(self) -> Any: ...


Prompt = str | list[int]  # or a Media, of a processor's output
Prompts = Prompt | Listed | Mapping[str, Any] | Sequence[Prompt | Listed]
Seed = int | Sequence[int | tuple[int, int]] | None


def check(gamma: int | None, rule: str | Rule, lenience: float) -> Verifier:
    """Return the verifier of the draft tokens; raises as `SpeculationOptions` does."""
    asked = SpeculationOptions(gamma, rule, lenience)
    if rule == COUPLED:
        return verifier.COUPLED
    distribution_rule = verifier.NAMED[rule] if isinstance(rule, str) else verifier.OwnRule(rule)
    return verifier.choose(distribution_rule, asked.lenience)


def as_list(prompts: Prompts) -> list[Prompt]:
    """Return a list of prompts from one (a str, or ids) or several.

    Ids are lists, tensors or arrays; a tensor `[B, n]` is B prompts, as is a tokenizer's output,
    whose attention mask is applied.
    """
    if isinstance(prompts, str):
        return [prompts]
    listed = _encoded(prompts) if isinstance(prompts, Mapping) else _plain(prompts)
    if not isinstance(listed, list):
        raise InputError(
            f"prompts is a {type(prompts).__name__}; give a str, ids, or a list of them"
        )
    if listed and all(_is_id(part) for part in listed):
        return [listed]
    for i, prompt in enumerate(listed):
        if not isinstance(prompt, str) and not (
            isinstance(prompt, list) and all(_is_id(token) for token in cast(list[Any], prompt))
        ):
            raise InputError(f"prompt {i} is {shown(prompt)}; give a str or a list of ids")
    return listed


def _plain(value: Any) -> Any:
    """Tensors, arrays and tuples as lists, NumPy's numbers as Python's, anything else unchanged."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def _encoded(batch: Mapping[str, Any]) -> list[Any]:
    """Return the ids in a tokenizer's output, without the padding on either side."""
    if "input_ids" not in batch:
        raise InputError("prompts holds no input_ids; give what a tokenizer returns, or ids")
    if media := sorted(batch.keys() - TEXT):
        raise InputError(
            f"prompts hold {', '.join(media)}, and ids alone are read here; give these"
        )
    ids, mask = _plain(batch["input_ids"]), _plain(batch.get("attention_mask"))
    if mask is not None and not _alike(ids, mask):
        raise InputError("attention_mask has not the shape of input_ids; give both as they came")
    return ids if mask is None or not isinstance(ids, list) else _masked(ids, mask)


def _alike(ids: Any, mask: Any) -> bool:
    """Tell whether these are lists, or lists of lists, of the same lengths; or both no lists."""
    if isinstance(ids, list) and isinstance(mask, list):
        return len(ids) == len(mask) and all(map(_alike, ids, mask))
    return not isinstance(ids, list) and not isinstance(mask, list)


def _masked(ids: list[Any], mask: list[Any]) -> list[Any]:
    """Return the ids where the mask is not 0, in nested lists too."""
    pairs = zip(ids, mask, strict=True)
    return [
        _masked(a, b) if isinstance(a, list) else a for a, b in pairs if isinstance(a, list) or b
    ]


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def keys_of(seed: Seed, counts: list[int]) -> list[RowKey]:
    """Return a key for each row, `counts[i]` for prompt i; None draws a seed for all of them. Where
    a prompt has a seed of its own, its rows are numbered from that seed's row on."""
    if seed is None:
        seed = randbits(63)
    if whole(seed):
        return [RowKey(SEED("seed", seed), row) for row in range(sum(counts))]
    if not isinstance(seed, list | tuple):
        raise InputError(f"seed is {shown(seed)}; give an integer, or one for each prompt")
    if len(seed) != len(counts):
        raise InputError(
            f"seed has {len(seed)} entries for {len(counts)} prompts; give one for each"
        )
    pairs = [s if isinstance(s, list | tuple) else (s, 0) for s in seed]
    for pair in pairs:
        if len(pair) != 2:
            raise InputError(f"seed holds {shown(pair)}; give integers, or pairs of them")
    return [
        RowKey(SEED("seed", s), SEED("seed", SEED("seed", row) + j))
        for (s, row), count in zip(pairs, counts, strict=True)
        for j in range(count)
    ]
