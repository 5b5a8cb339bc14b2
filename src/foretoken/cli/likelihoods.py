"""How likely tokens were, as a table under the text and in JSON."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from foretoken.cli.render import page
from foretoken.errors import shown
from foretoken.text.decoding import REPLACEMENT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from foretoken.request import Completion
    from foretoken.sampling.logprobs import Logprobs


def show(
    tokenizer: PreTrainedTokenizerBase | None, prompt: list[int], completion: Completion
) -> None:
    """A table for the prompt and one for the text, where they were asked for."""
    if completion.prompt_logprobs is not None:
        page().print(_table("prompt", tokenizer, prompt[:1], completion.prompt_logprobs))
    if completion.logprobs is not None:
        page().print(_table("token", tokenizer, prompt, completion.logprobs))


def _table(
    name: str,
    tokenizer: PreTrainedTokenizerBase | None,
    before: list[int],
    likelihoods: list[Logprobs],
) -> Table:
    """A row for every token behind `before`."""
    table = Table(name, box=box.SIMPLE_HEAD)
    table.add_column("logprob", justify="right")
    if any(each.top for each in likelihoods):
        table.add_column("likeliest")
    so_far = list(before)
    for each in likelihoods:
        top = "  ".join(f"{_spell(tokenizer, so_far, i)} {value:.3f}" for i, value in each.top)
        cells = [_spell(tokenizer, so_far, each.token), f"{each.logprob:.3f}", top]
        table.add_row(*map(Text, cells[: len(table.columns)]))
        so_far.append(each.token)
    return table


def _spell(tokenizer: PreTrainedTokenizerBase | None, before: list[int], token: int) -> str:
    """In quotes; as the vocabulary spells it where it is no text of its own."""
    from foretoken.lab import view  # late: torch

    if tokenizer is None:
        return str(token)
    text = view.spell(tokenizer, before, token)
    if not text or REPLACEMENT in text:
        return str(tokenizer.convert_ids_to_tokens(token))
    return shown(text)


def document(completion: Completion) -> dict[str, Any]:
    """The same in JSON, where it was asked for."""
    names = ("logprobs", "prompt_logprobs")
    lists = {name: getattr(completion, name) for name in names}
    return {
        n: [_entry(each) for each in likelihoods]
        for n, likelihoods in lists.items()
        if likelihoods is not None
    }


def _entry(likelihood: Logprobs) -> dict[str, Any]:
    top = [[token, _finite(logprob)] for token, logprob in likelihood.top]
    return {"token": likelihood.token, "logprob": _finite(likelihood.logprob), "top": top}


def _finite(logprob: float) -> float | None:
    """None for what could not occur: JSON has no infinity."""
    return logprob if math.isfinite(logprob) else None
