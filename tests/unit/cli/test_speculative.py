"""`--speculative-config` is read as vLLM reads it, or refused by the key that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretoken.cli.speculative_config import parse_speculative_config
from foretoken.errors import InputError


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        ({"model": "a/d"}, ("a/d", None, "block")),
        (
            {"method": "draft_model", "model": "a/d", "num_speculative_tokens": 4},
            ("a/d", 4, "block"),
        ),
        ({"method": "eagle3", "model": "a/d"}, ("a/d", None, "block")),
        ({"method": "mtp", "num_speculative_tokens": 2}, ("mtp", 2, "block")),
        (
            {"method": "ngram", "model": "ngram", "rejection_sample_method": "standard"},
            ("lookup", None, "speculative"),
        ),
    ],
)
def test_draft_gamma_and_rule_follow(config: dict[str, Any], settings: tuple[Any, ...]) -> None:
    assert parse_speculative_config(json.dumps(config)) == settings


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not valid JSON"),
        ("[1]", "give a JSON object"),
        ("{}", "method is None; give one of draft_model, ngram"),
        ('{"methd": "ngram"}', "unknown 'methd'; did you mean method?"),
        ('{"draft_tensor_parallel_size": 1}', "give any of method, model"),
        ('{"method": "eagle", "model": "a"}', "method is 'eagle'"),
        ('{"method": "ngram", "model": "a"}', "model is 'a'"),
        ('{"method": "dspark"}', "model is None; give the draft model"),
        ('{"model": "a", "num_speculative_tokens": 0}', "num_speculative_tokens is 0"),
        ('{"model": "a", "rejection_sample_method": "typical"}', "give one of standard, block"),
    ],
)
def test_what_is_refused(text: str, said: str) -> None:
    with pytest.raises(InputError, match="--speculative-config") as caught:
        parse_speculative_config(text)
    assert said in str(caught.value)


def test_a_method_that_the_draft_is_not(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"speculators_model_type": "eagle3"}')
    config = {"method": "dflash", "model": str(tmp_path)}
    with pytest.raises(InputError, match="method is 'dflash'"):
        parse_speculative_config(json.dumps(config))
    assert parse_speculative_config(json.dumps(config | {"method": "eagle3"})).draft == str(
        tmp_path
    )
