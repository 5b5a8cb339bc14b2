"""Texts under JSON schemas: every one parses and validates, in batches, whatever model writes."""

from __future__ import annotations

import json

import jsonschema
import pytest

from foretoken import SamplingParams, load
from schemas import SCHEMAS
from tiny import byte_level, t5

MOST = 900  # tokens: models that know no JSON write a character at a time
TIGHT = {"x-guidance": {"whitespace_pattern": "[ ]?"}}  # the shipped pair's context is short
NAMES = list(SCHEMAS)


def decoder():
    return load()


def encoder_decoder():
    """Random weights: it has no idea of JSON."""
    return load(t5(320), "lookup", tokenizer=byte_level(), runtime="transformers")


def check(make, names: list[str]) -> None:
    """Batches of 8, greedy and sampled rows mixed."""
    spec = make()
    for i in range(0, len(names), 8):
        batch = names[i : i + 8]
        params = [
            SamplingParams(
                temperature=float(j % 2),
                max_new_tokens=MOST,
                structured={"json_schema": SCHEMAS[name] | TIGHT},
            )
            for j, name in enumerate(batch)
        ]
        prompts = [f"A {name}: " for name in batch]
        for name, out in zip(batch, spec.generate(prompts, params, gamma=3, seed=i), strict=True):
            assert out.finish_reason == "stop", f"{name}: {out.text!r}"
            jsonschema.validate(json.loads(out.text or ""), SCHEMAS[name])


def test_there_are_200() -> None:
    assert len(SCHEMAS) == 200


@pytest.mark.parametrize("make", [decoder, encoder_decoder])
def test_some(make) -> None:
    check(make, NAMES[3::25])


@pytest.mark.prove
@pytest.mark.parametrize("make", [decoder, encoder_decoder])
def test_all(make) -> None:
    check(make, NAMES)
