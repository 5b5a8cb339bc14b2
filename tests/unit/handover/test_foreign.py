"""What is refused of a call of transformers' `generate`; `test_handed` has whole calls."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from transformers import GenerationConfig

from foretoken.ends import CHANGES_LAW, FOLLOWED
from foretoken.errors import InputError, RefusedError
from foretoken.handover.foreign import UNKNOWN, require_known, require_ours, withheld
from foretoken.models.table import TableModel
from oracle import random_model
from tiny import llama, t5


def test_transformers_defaults_are_all_followed():
    config = GenerationConfig(**GenerationConfig._get_default_generation_params())
    require_known(config, {"attention_mask": None, "token_type_ids": None})


@pytest.mark.parametrize("entry", [*UNKNOWN, *sorted({*CHANGES_LAW} - FOLLOWED)])
def test_every_entry_that_is_not_followed_is_refused_by_name(entry):
    config = GenerationConfig()
    setattr(config, entry, 7)
    with pytest.raises(RefusedError, match=f"^{entry}=7 (is not followed|asks for a beam)"):
        require_known(config, {})


def test_a_cache_of_less_precision():
    with pytest.raises(RefusedError, match="^cache_implementation='quantized' changes the law"):
        require_known(GenerationConfig(cache_implementation="quantized"), {})


def test_an_input_of_the_model():
    with pytest.raises(RefusedError, match="^token_type_ids is given"):
        require_known(GenerationConfig(), {"token_type_ids": 1})


def test_a_model_that_runs_converted_is_compared_by_kind_and_vocabulary():
    model: Any = llama(64)
    require_ours(model, TableModel(random_model(1, 64), 64), {})
    for target in (
        TableModel(random_model(1, 63), 63),
        TableModel(random_model(1, 64), 64, encoder_decoder=True),
    ):
        with pytest.raises(InputError, match="^custom_generate is a Speculator of another model"):
            require_ours(model, target, {})
    require_ours(t5(64), TableModel(random_model(1, 64), 64, encoder_decoder=True), {})


@pytest.mark.parametrize("name", ["synced_gpus", "encoder_outputs"])
def test_what_generate_keeps_to_itself(name):
    with pytest.raises(RefusedError, match=f"^{name} is given"):
        require_ours(llama(64), TableModel(random_model(1, 64), 64), {name: (1,)})  # type: ignore


def test_only_the_generate_of_transformers_is_looked_into():
    def generate() -> Any:
        streamer, kwargs = "mine", None
        assert streamer and kwargs is None
        return withheld(sys._getframe(0))

    assert generate() == {} and withheld(None) == {}
