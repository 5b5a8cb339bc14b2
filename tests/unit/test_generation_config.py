"""How a model's own settings begin and end a text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from foretoken import load
from foretoken.errors import InputError, RefusedError
from foretoken.generation_config import (
    FOLLOWED_ENTRIES,
    FORCED_ID_ENTRIES,
    NEUTRAL_SAMPLING,
    UNFOLLOWED_ENTRIES,
    EndTokens,
    GenerationSettings,
    read_settings,
    resolve_params,
)
from foretoken.sampling.params import SamplingParams
from tiny import byte_level, llama, t5


def test_what_a_model_says():
    assert read_settings(llama(64)).ends == EndTokens(frozenset({0}))
    assert read_settings(t5(64)).ends == EndTokens(frozenset({0}), decoder_start=1)


def test_the_generation_config_has_the_last_word():
    target = t5(64)
    target.generation_config = GenerationConfig(
        eos_token_id=[5, 6],
        decoder_start_token_id=[7],
        forced_bos_token_id=8,
        forced_eos_token_id=9,
    )
    assert read_settings(target).ends == EndTokens(frozenset({5, 6}), 7, 8, 9)


def test_several_beginnings_are_refused():
    """Transformers begins each row with its own; also where the rest is ignored."""
    target = t5(64)
    target.generation_config.decoder_start_token_id = [9, 5]
    for ignored in (None, "ignore"):
        with pytest.raises(RefusedError, match=r"decoder_start_token_id=\[9, 5\]"):
            load(target, "none", generation_config=ignored)


@pytest.mark.parametrize("entry", FORCED_ID_ENTRIES)
def test_several_ids_that_are_forced_at_once_are_refused(entry):
    """Transformers makes them equally likely."""
    target = t5(64)
    setattr(target.generation_config, entry, [9, 5])
    with pytest.raises(RefusedError, match=rf"sets {entry}=\[9, 5\], which is not supported"):
        load(target, "none")
    ends = load(target, "none", generation_config="ignore").ends
    assert ends.forced_bos is ends.forced_eos is None
    setattr(target.generation_config, entry, [9])
    assert 9 in (read_settings(target).ends.forced_bos, read_settings(target).ends.forced_eos)


@pytest.mark.parametrize(("cache", "followed"), [("static", True), ("quantized", False)])
def test_a_cache_that_rounds_keys_and_values_is_another_model(cache, followed):
    target = llama(64)
    target.generation_config.cache_implementation = cache
    assert (read_settings(target).objection is None) == followed


def test_every_entry_that_transformers_knows_is_followed_or_refused_or_documented_as_ignored():
    """One that is new in transformers has to be looked at."""
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    page = (Path(__file__).parents[2] / "docs" / "controls.md").read_text()
    section = page.partition("## Entries of a generation config")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if "`" in line[:3]]
    listed = [(name, says) for names, says in rows for name in re.findall(r"`(\w+)`", names)]
    known |= UNFOLLOWED_ENTRIES.keys()  # some are from older versions
    assert {name for name, _ in listed} == known and len(listed) == len(known)
    kinds = {
        "refused": {*UNFOLLOWED_ENTRIES, "cache_implementation"},
        "followed": {*FOLLOWED_ENTRIES},
        "suggested": {*NEUTRAL_SAMPLING, "do_sample"},
        "used": {*FORCED_ID_ENTRIES, "eos_token_id", "bos_token_id"} | {"decoder_start_token_id"},
    }
    for kind, names in kinds.items():
        assert {name for name, says in listed if says.startswith(kind)} == names, kind
    others = [says for name, says in listed if not any(name in each for each in kinds.values())]
    assert all(says.startswith("ignored: ") for says in others)


@pytest.mark.parametrize("value", ["x", 1.5, [1, "a"], True, {"a": 1}])
def test_an_end_must_be_an_id(value):
    target = llama(64)
    target.generation_config.eos_token_id = value
    with pytest.raises(InputError, match="eos_token_id=.*") as error:
        read_settings(target)
    assert "\n" not in str(error.value)


def test_a_decoder_may_start_with_bos_but_must_start():
    target = t5(64)
    target.generation_config = GenerationConfig(bos_token_id=3)
    assert read_settings(target).ends.decoder_start == 3
    target.generation_config = GenerationConfig()
    with pytest.raises(RefusedError, match="has no decoder_start_token_id"):
        read_settings(target)


@pytest.mark.parametrize("entry", [*FOLLOWED_ENTRIES, *UNFOLLOWED_ENTRIES])
def test_what_changes_nothing_is_no_entry(entry):
    target = llama(64)
    for harmless in (FOLLOWED_ENTRIES | UNFOLLOWED_ENTRIES)[entry]:
        setattr(target.generation_config, entry, harmless)
        settings = read_settings(target)
        assert settings.objection is None and settings.controls == {}


# Each entry that is followed: a value, as it is kept, and what a caller gives to switch it off
ENTRIES: dict[str, tuple[Any, Any, Any]] = {
    "repetition_penalty": (1.8, 1.8, 1.0),
    "encoder_repetition_penalty": (1.7, 1.7, 1),
    "no_repeat_ngram_size": (1, 1, 0),
    "encoder_no_repeat_ngram_size": (1, 1, 0),
    "bad_words_ids": ([[5], [7, 8]], [[5], [7, 8]], []),
    "min_length": (8, 8, 0),
    "min_new_tokens": (6, 6, 0),
    "typical_p": (0.3, 0.3, 1.0),
    "epsilon_cutoff": (0.3, 0.3, 0.0),
    "eta_cutoff": (0.5, 0.5, 0.0),
    "suppress_tokens": ([1, 2, 3], [1, 2, 3], []),
    "begin_suppress_tokens": ([1, 2, 3], [1, 2, 3], []),
    "sequence_bias": ({(9,): 2.5, (1, 2): -3.0}, [[[9], 2.5], [[1, 2], -3.0]], {}),
    "exponential_decay_length_penalty": ((1, 1.5), (1, 1.5), (99, 1.0)),
    "remove_invalid_values": (True, True, False),
    "stop_strings": (["e", "a"], ["e", "a"], []),
}
PROMPTS = [[5, 17, 33], [60, 12, 7, 9, 44]]


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_that_is_followed(entry):
    """A call that leaves it open generates as one that names it; a caller who names it wins."""
    value, kept, off = ENTRIES[entry]
    target = llama(320, eos_token_id=[*range(40)])
    plain = load(target, "lookup", tokenizer=byte_level())
    setattr(target.generation_config, entry, value)
    settings = read_settings(target)
    assert settings.objection is None and settings.controls == {entry: kept}
    assert GenerationSettings.from_dict(
        json.loads(json.dumps(settings.to_dict()))
    ).controls == json.loads(json.dumps({entry: kept}))
    own = load(target, "lookup", tokenizer=byte_level())
    ignoring = load(target, "lookup", tokenizer=byte_level(), generation_config="ignore")
    name = "min_new_tokens" if entry == "min_length" else entry
    counts = [8 - len(prompt) for prompt in PROMPTS] if entry == "min_length" else [value] * 2

    def text(pair, prompt, **named):
        (completion,) = pair.generate(
            [prompt], temperature=0.9, gamma=2, max_new_tokens=12, **named
        )
        return completion.tokens

    for prompt, given in zip(PROMPTS, counts, strict=True):
        assert text(own, prompt) == text(plain, prompt, **{name: given})
        unlike = text(plain, prompt)
        assert text(own, prompt, **{name: off}) == unlike == text(ignoring, prompt)


@pytest.mark.parametrize(
    ("entry", "value"),
    [("repetition_penalty", -1.0), ("bad_words_ids", 7), ("min_length", -3), ("typical_p", "x")],
)
def test_an_entry_that_cannot_be_followed(entry, value):
    target = llama(64)
    setattr(target.generation_config, entry, value)
    objection = read_settings(target).objection or ""
    assert objection.startswith("the model's generation config: ")
    assert objection.endswith("; correct the generation config") and "\n" not in objection
    assert load(target, "none", generation_config="ignore").controls == {}


def least(prompt: int, controls: dict[str, int], **sampling: int) -> int | None:
    return resolve_params(SamplingParams(**sampling), controls, EndTokens(), prompt).min_new_tokens


def test_min_length_counts_the_prompt():
    assert least(3, {"min_length": 8}) == 5
    assert least(8, {"min_length": 8}) is None and least(9, {"min_length": 8}) is None
    assert least(3, {"min_length": 8}, min_new_tokens=2) == 2
    assert least(3, {"min_length": 8}, min_new_tokens=0) == 0
    assert least(3, {"min_length": 8}, max_new_tokens=4) == 4  # there is no room for more
    assert least(3, {"min_new_tokens": 6}) == 6


def test_min_new_tokens_takes_the_place_of_min_length():
    """As in transformers, also where it is 0."""
    target = llama(64)
    target.generation_config.update(min_length=20, min_new_tokens=6)
    assert read_settings(target).controls == {"min_new_tokens": 6}
    target.generation_config.min_new_tokens = 0
    assert read_settings(target).controls == {}


def test_forced_ids_are_the_callers_where_he_names_them():
    ends = EndTokens(forced_bos=4, forced_eos=5)
    open_ = resolve_params(SamplingParams(), {}, ends, 1)
    assert (open_.forced_bos_token_id, open_.forced_eos_token_id) == (4, 5)
    mine = resolve_params(SamplingParams(forced_eos_token_id=9), {}, ends, 1)
    assert (mine.forced_bos_token_id, mine.forced_eos_token_id) == (4, 9)
    sampling = SamplingParams(0.5)
    assert resolve_params(sampling, {}, EndTokens(), 1) is sampling


@pytest.mark.parametrize("entry", UNFOLLOWED_ENTRIES)
def test_an_entry_that_changes_the_distribution_and_is_not_followed(entry):
    target = llama(64)
    for harmless in UNFOLLOWED_ENTRIES[entry]:
        setattr(target.generation_config, entry, harmless)
        assert read_settings(target).objection is None
    setattr(target.generation_config, entry, 7)
    with pytest.raises(RefusedError, match=f"sets {entry}=7, which is not supported") as error:
        load(target, "none")
    assert "generation_config='ignore' (--ignore-generation-config)" in str(error.value)
    assert read_settings(target).objection == str(error.value)
    assert read_settings(target).ends.eos == {0}


@pytest.mark.parametrize("token", [64, 999, -1])
@pytest.mark.parametrize("entry", ["decoder_start", "forced_bos", "forced_eos"])
def test_an_id_that_every_text_holds_must_be_the_models(entry, token):
    """Else torch ends in an IndexError, and the kernels read some other row."""
    target = t5(64)
    setattr(target.generation_config, f"{entry}_token_id", token)
    for ignored in (None, "ignore"):
        with pytest.raises(
            InputError, match=rf"{entry}_token_id={token}, but ids must be in 0\.\.63"
        ):
            load(target, "none", generation_config=ignored)
    target.generation_config.update(**{f"{entry}_token_id": 63})
    assert len(load(target, "none").generate([[5, 6]], max_new_tokens=3)[0].tokens) <= 3


def test_settings_outlive_the_process():
    """In JSON, beside a kept conversion."""
    target = t5(64)
    target.generation_config.update(forced_eos_token_id=9, num_beams=4, do_sample=True, top_k=5)
    settings = read_settings(target)
    assert settings.suggested == {"temperature": 1.0, "top_k": 5}
    assert "num_beams=4" in settings.objection and settings.ends.forced_eos == 9
    assert GenerationSettings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings
