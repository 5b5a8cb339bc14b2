"""vLLM's words for what drafts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from foretoken.cli.option import Chosen, speculative
from foretoken.errors import InputError


@pytest.mark.parametrize(
    ("config", "chosen"),
    [
        ({"method": "draft_model", "model": "d"}, Chosen("d")),
        ({"model": "d", "num_speculative_tokens": 4}, Chosen("d", 4)),
        ({"method": "ngram", "num_speculative_tokens": 3}, Chosen("lookup", 3)),
        ({"model": "d", "rejection_sample_method": "standard"}, Chosen("d", None, "speculative")),
    ],
)
def test_what_it_means(config: dict[str, Any], chosen: Chosen) -> None:
    assert speculative(json.dumps(config), None) == chosen


def test_without_it_the_draft_is_as_given() -> None:
    assert speculative(None, "d") == Chosen("d") and speculative(None, None) == Chosen(None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{", "speculative"),
        ("[]", "give a JSON object"),
        ('{"modle": "d"}', "did you mean model?"),
        ('{"method": "eagle3", "model": "d"}', "draft_model, ngram"),
        ('{"method": "draft_model"}', "name the draft model"),
        ('{"model": "d", "num_speculative_tokens": 0}', "a whole number from 1"),
        ('{"model": "d", "rejection_sample_method": "synthetic"}', "standard, block"),
    ],
)
def test_what_is_refused(given: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        speculative(given, None)


def test_one_of_the_two() -> None:
    with pytest.raises(InputError, match="both given"):
        speculative("{}", "d")
