"""Texts under JSON schemas: every one parses and validates, in batches, whatever model writes."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from foretoken import SamplingParams, load
from schemas import SCHEMAS
from tiny import byte_level, llama, t5

MOST = 900  # tokens: models that know no JSON write a character at a time
NAMES = list(SCHEMAS)


def blanks(text: str) -> int:
    """Characters of white space outside strings."""
    return sum(map(str.isspace, re.sub(r'"(\\.|[^"\\])*"', "", text)))


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
                structured={"json_schema": SCHEMAS[name]},
            )
            for j, name in enumerate(batch)
        ]
        prompts = [f"A {name}: " for name in batch]
        for name, out in zip(batch, spec.generate(prompts, params, gamma=3, seed=i), strict=True):
            assert out.finish_reason == "stop", f"{name}: {out.text!r}"
            value = json.loads(out.text or "")
            jsonschema.validate(value, SCHEMAS[name])
            assert blanks(out.text or "") <= blanks(json.dumps(value)), out.text


def test_there_are_200() -> None:
    assert len(SCHEMAS) == 200


@pytest.mark.parametrize("make", [decoder, encoder_decoder])
def test_some(make) -> None:
    check(make, NAMES[3::50])


@pytest.mark.prove
@pytest.mark.parametrize("make", [decoder, encoder_decoder])
def test_all(make) -> None:
    check(make, NAMES)


@pytest.mark.parametrize(
    "own", [None, {"whitespace_flexible": True}, {"whitespace_pattern": "[ ]{0,3}"}]
)
def test_blanks_between_the_parts_of_a_document(own) -> None:
    """At most one behind a colon or a comma; a schema may ask for more."""
    spec, schema = encoder_decoder(), {"type": "array", "items": {"const": 1}, "minItems": 6}
    schema |= {"maxItems": 6} | ({} if own is None else {"x-guidance": own})
    params = SamplingParams(1.3, max_new_tokens=400, structured={"json_schema": schema})
    texts = [out.text or "" for out in spec.generate(["A"] * 6, params, gamma=3, seed=1)]
    tight = re.compile(r"\[1(, ?1){5}\]")
    assert all(bool(tight.fullmatch(text)) for text in texts) == (own is None), texts


def test_forced_tokens_need_no_draft() -> None:
    """They are drafted where gamma is chosen, and the text is that of plain decoding."""
    target = llama(320, 400)
    spec = load(target, "none", tokenizer=byte_level(), runtime="transformers", dtype="float64")
    schema = {"const": {"a rather long key of an object": "and all of its only value"}}
    params = SamplingParams(0.0, max_new_tokens=200, structured={"json_schema": schema})
    plain, chosen = (spec.generate("A", params, gamma=gamma)[0] for gamma in (0, None))
    assert chosen.text == plain.text and json.loads(plain.text or "") == schema["const"]
    assert plain.stats.drafted == 0 < chosen.stats.accepted
    assert chosen.stats.target_calls < plain.stats.target_calls
