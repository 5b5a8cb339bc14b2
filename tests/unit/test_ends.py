"""How a model's own settings begin and end a text."""

from __future__ import annotations

import json

import pytest
from transformers import GenerationConfig

from foretoken import load
from foretoken.ends import CHANGES_LAW, Ends, Settings, read_settings
from foretoken.errors import InputError, RefusedError
from tiny import llama, t5


def test_what_a_model_says():
    assert read_settings(llama(64)).ends == Ends(frozenset({0}))
    assert read_settings(t5(64)).ends == Ends(frozenset({0}), decoder_start=1)


def test_the_generation_config_has_the_last_word():
    target = t5(64)
    target.generation_config = GenerationConfig(
        eos_token_id=[5, 6],
        decoder_start_token_id=[7],
        forced_bos_token_id=8,
        forced_eos_token_id=9,
    )
    assert read_settings(target).ends == Ends(frozenset({5, 6}), 7, 8, 9)


def test_a_model_without_one_is_read_from_its_config():
    target = llama(64)
    target.generation_config = None
    assert read_settings(target).ends.eos == {0}


@pytest.mark.parametrize(
    "entry", ["decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id"]
)
def test_several_ids_where_a_text_has_one_are_refused(entry):
    """Transformers means other things by a list; also where the rest is ignored."""
    target = t5(64)
    setattr(target.generation_config, entry, [9, 5])
    for ignored in (None, "ignore"):
        with pytest.raises(RefusedError, match=rf"sets {entry}=\[9, 5\]; set one id there"):
            load(target, "none", generation_config=ignored)


@pytest.mark.parametrize("value", ["x", 1.5, [1, "a"], True, {"a": 1}])
def test_an_end_must_be_an_id(value):
    target = llama(64)
    target.generation_config.eos_token_id = value
    with pytest.raises(InputError, match="eos_token_id=.*; give an id or a list of ids") as error:
        read_settings(target)
    assert "\n" not in str(error.value)


def test_no_end_at_all():
    target = llama(64)
    target.generation_config = GenerationConfig()
    assert read_settings(target).ends == Ends()


def test_a_decoder_may_start_with_bos_but_must_start():
    target = t5(64)
    target.generation_config = GenerationConfig(bos_token_id=3)
    assert read_settings(target).ends.decoder_start == 3
    target.generation_config = GenerationConfig()
    with pytest.raises(RefusedError, match="names no decoder_start_token_id; set it"):
        read_settings(target)


@pytest.mark.parametrize("entry", CHANGES_LAW)
def test_every_entry_that_changes_the_law(entry):
    target = llama(64)
    for harmless in CHANGES_LAW[entry]:
        setattr(target.generation_config, entry, harmless)
        assert read_settings(target).objection is None
    setattr(target.generation_config, entry, 7)
    with pytest.raises(RefusedError, match=f"sets {entry}=7, which is not followed here") as error:
        load(target, "none")
    assert "generation_config='ignore' (--ignore-generation-config)" in str(error.value)
    assert read_settings(target).objection == str(error.value)
    assert read_settings(target).ends.eos == {0}


@pytest.mark.parametrize("token", [64, 999, -1])
@pytest.mark.parametrize("entry", ["decoder_start", "forced_bos", "forced_eos"])
def test_an_id_that_every_text_holds_must_be_the_models(entry, token):
    """Else torch ends in an IndexError, and OpenVINO reads some other row."""
    target = t5(64)
    setattr(target.generation_config, f"{entry}_token_id", token)
    for ignored in (None, "ignore"):
        with pytest.raises(InputError, match=rf"{entry}_token_id={token}; ids must be in 0\.\.63"):
            load(target, "none", generation_config=ignored)
    target.generation_config.update(**{f"{entry}_token_id": 63})
    assert len(load(target, "none").generate([[5, 6]], max_new_tokens=3)[0].tokens) <= 3


def test_an_end_that_never_comes_is_none():
    target = llama(64)
    target.generation_config.eos_token_id = [64, 0]
    assert load(target, "none").ends.eos == {0, 64}


def test_settings_outlive_the_process():
    """In JSON, beside a kept conversion."""
    target = t5(64)
    target.generation_config.update(forced_eos_token_id=9, num_beams=4, do_sample=True, top_k=5)
    settings = read_settings(target)
    assert settings.suggested == {"temperature": 1.0, "top_k": 5}
    assert "num_beams=4" in settings.objection and settings.ends.forced_eos == 9
    assert Settings.of(json.loads(json.dumps(settings.to_dict()))) == settings
