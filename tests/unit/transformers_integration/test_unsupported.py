"""What is refused of a call of transformers' `generate`, and which of its processors are the user's
own."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from foretoken import load
from foretoken.errors import ForeignError
from foretoken.generation_config import UNFOLLOWED_ENTRIES
from foretoken.transformers_integration.unsupported import (
    UNSUPPORTED_ENTRIES,
    find_custom_processors,
    read_withheld_arguments,
    require_position_free,
    require_same_model,
    require_supported_config,
)
from oracle import random_model
from pairs import DEVICE, relative, target
from refusals import ENTRIES, REFUSALS
from table import TableModel
from tiny import llama, t5

PLAIN = {"max_new_tokens": 12, "pad_token_id": 1, "do_sample": False}


def test_transformers_defaults_are_all_followed():
    config = GenerationConfig(**GenerationConfig._get_default_generation_params())
    require_supported_config(config, {"attention_mask": None, "token_type_ids": None})


def test_every_entry_that_is_not_followed_has_its_call():
    # without a tokenizer, which no custom_generate gets, transformers itself refuses token healing
    assert {*ENTRIES, "token_healing"} == UNSUPPORTED_ENTRIES.keys() | UNFOLLOWED_ENTRIES.keys()


@cache
def speculator(family: str) -> Any:
    model = target(family)
    return load(model, relative(model), runtime="transformers")


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS.keys())
@pytest.mark.filterwarnings("ignore")
def test_what_is_not_followed_is_refused_by_name_before_a_number_is_drawn(refusal):
    """What `attach` makes of these, `test_attach` has."""
    spec = speculator(refusal.family)
    options = refusal.options(spec.target.model)
    if not {"inputs", "inputs_embeds", "encoder_outputs"} & options.keys():
        options["inputs"] = torch.tensor([[5, 17, 33]], device=DEVICE)
    numbers = torch.get_rng_state()
    with pytest.raises(ForeignError) as error:
        spec.target.model.generate(custom_generate=spec, **(PLAIN | options))
    assert str(error.value).startswith(refusal.says) and "\n" not in str(error.value)
    assert torch.get_rng_state().equal(numbers)


def test_a_cache_of_less_precision():
    with pytest.raises(ForeignError, match="^cache_implementation='quantized' is not supported"):
        require_supported_config(GenerationConfig(cache_implementation="quantized"), {})


def test_a_model_that_runs_converted_is_compared_by_kind_and_vocabulary():
    model: Any = llama(64)
    require_same_model(model, TableModel(random_model(1, 64), 64), {})
    for other in (
        TableModel(random_model(1, 63), 63),
        TableModel(random_model(1, 64), 64, encoder_decoder=True),
    ):
        with pytest.raises(ForeignError, match="^custom_generate is a Speculator of another model"):
            require_same_model(model, other, {})
    require_same_model(t5(64), TableModel(random_model(1, 64), 64, encoder_decoder=True), {})


@pytest.mark.parametrize("name", ["synced_gpus", "encoder_outputs"])
def test_what_generate_keeps_to_itself(name):
    with pytest.raises(ForeignError, match=f"^{name} is given"):
        require_same_model(llama(64), TableModel(random_model(1, 64), 64), {name: (1,)})  # type: ignore


def test_only_the_generate_of_transformers_is_looked_into():
    def generate() -> Any:
        streamer, kwargs = "mine", None
        assert streamer and kwargs is None
        return read_withheld_arguments(sys._getframe(0))

    assert generate() == {} and read_withheld_arguments(None) == {}


# The user's own processors


class Mine(LogitsProcessor):
    def __init__(self, values: Any = None) -> None:
        self.values = values


def repeated(penalty: float = 1.2, **options: Any) -> RepetitionPenaltyLogitsProcessor:
    return RepetitionPenaltyLogitsProcessor(penalty, **options)


def test_what_the_config_explains_is_taken_away_once():
    mine, cold = Mine(), TemperatureLogitsWarper(0.5)
    built = [repeated(), NoRepeatNGramLogitsProcessor(2), TemperatureLogitsWarper(0.5)]
    prepared = [repeated(), NoRepeatNGramLogitsProcessor(2), mine, cold, built[-1]]
    assert find_custom_processors(prepared, built) == [mine, cold]
    assert find_custom_processors(built, built) == [] and find_custom_processors([mine], []) == [
        mine
    ]


def test_one_s_own_of_the_last_equal_to_the_config_s_stays():
    """transformers applies both: the user's own in its place, the config's at the end."""
    own = TemperatureLogitsWarper(0.5)
    prepared = [own, Mine(), TemperatureLogitsWarper(0.5), TopKLogitsWarper(3)]
    processors = find_custom_processors(
        prepared, [TemperatureLogitsWarper(0.5), TopKLogitsWarper(3)]
    )
    assert len(processors) == 2 and processors[0] is own


@pytest.mark.parametrize(
    ("prepared", "built", "says"),
    [
        (
            [repeated(1.5), NoRepeatNGramLogitsProcessor(2)],
            [repeated(1.2), NoRepeatNGramLogitsProcessor(2)],
            "RepetitionPenaltyLogitsProcessor is given and repetition_penalty is set",
        ),
        (
            [Mine(), NoRepeatNGramLogitsProcessor(2)],
            [NoRepeatNGramLogitsProcessor(2)],
            "Mine would come before no_repeat_ngram_size",
        ),
        ([Mine()], [Mine()], "the model adds its own Mine"),
    ],
)
def test_what_would_change_the_order_is_refused(prepared, built, says):
    with pytest.raises(ForeignError, match=f"^{says}"):
        find_custom_processors(prepared, built)


def test_what_counts_places_is_refused_in_a_batch():
    require_position_free([Mine(), repeated(), TopKLogitsWarper(3)], padded=True)
    with pytest.raises(
        ForeignError, match="^RepetitionPenaltyLogitsProcessor depends on positions"
    ):
        require_position_free([repeated(prompt_ignore_length=2)], padded=False)
