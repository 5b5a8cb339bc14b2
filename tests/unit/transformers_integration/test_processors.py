"""Which processors of a prepared list are the user's own."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import (
    LogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from foretoken.errors import ForeignError
from foretoken.transformers_integration.processors import alike, given, require_anywhere


class Mine(LogitsProcessor):
    def __init__(self, values: Any = None) -> None:
        self.values = values


def repeated(penalty: float = 1.2, **options: Any) -> RepetitionPenaltyLogitsProcessor:
    return RepetitionPenaltyLogitsProcessor(penalty, **options)


def test_what_the_config_explains_is_taken_away_once():
    mine, cold = Mine(), TemperatureLogitsWarper(0.5)
    built = [repeated(), NoRepeatNGramLogitsProcessor(2), TemperatureLogitsWarper(0.5)]
    prepared = [repeated(), NoRepeatNGramLogitsProcessor(2), mine, cold, built[-1]]
    assert given(prepared, built) == [mine, cold]
    assert given(built, built) == [] and given([mine], []) == [mine]


def test_one_s_own_of_the_last_equal_to_the_config_s_stays():
    """transformers applies both: the user's own in its place, the config's at the end."""
    own = TemperatureLogitsWarper(0.5)
    prepared = [own, Mine(), TemperatureLogitsWarper(0.5), TopKLogitsWarper(3)]
    processors = given(prepared, [TemperatureLogitsWarper(0.5), TopKLogitsWarper(3)])
    assert len(processors) == 2 and processors[0] is own


@pytest.mark.parametrize(
    ("prepared", "built", "says"),
    [
        (
            [repeated(1.5), NoRepeatNGramLogitsProcessor(2)],
            [repeated(1.2), NoRepeatNGramLogitsProcessor(2)],
            "RepetitionPenaltyLogitsProcessor is given, and repetition_penalty is set too",
        ),
        (
            [Mine(), NoRepeatNGramLogitsProcessor(2)],
            [NoRepeatNGramLogitsProcessor(2)],
            "Mine would come before no_repeat_ngram_size",
        ),
        ([Mine()], [Mine()], "the model adds a Mine of its own"),
    ],
)
def test_what_would_change_the_order_is_refused(prepared, built, says):
    with pytest.raises(ForeignError, match=f"^{says}"):
        given(prepared, built)


def test_alike_by_class_and_values():
    bias = [[[1, 2], 3.0]]
    assert alike(SequenceBiasLogitsProcessor(bias), SequenceBiasLogitsProcessor(bias))
    assert not alike(SequenceBiasLogitsProcessor(bias), SequenceBiasLogitsProcessor([[[1], 3.0]]))
    assert not alike(TopKLogitsWarper(3), TemperatureLogitsWarper(3.0))
    assert not alike(repeated(prompt_ignore_length=2), repeated())
    assert not alike(Mine(1), type("Other", (Mine,), {})(1))


def test_what_counts_places_is_refused_in_a_batch():
    require_anywhere([Mine(), repeated(), TopKLogitsWarper(3)])
    with pytest.raises(ForeignError, match="^RepetitionPenaltyLogitsProcessor counts a batch's"):
        require_anywhere([repeated(prompt_ignore_length=2)])
