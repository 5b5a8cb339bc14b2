"""Every class of transformers that generates text runs and writes what its own `generate` writes,
or is refused in our words: no text of an error that its own code raised reaches a user."""

from __future__ import annotations

import re

import pytest
import torch
import transformers

import foretoken
from foretoken.errors import RefusedError
from foretoken.models.stock.cache import INSTEAD
from zoo import NOT_BUILT, build, classes

# Whole messages. What varies in them is names and numbers, never a sentence of somebody else's
REASONS = (
    r"it reads \w+, not text",
    "it has no head that generates text; load its ForCausalLM class",
    "its config says is_decoder false: it fills in masked words; set is_decoder",
    "it keeps a recurrent state, which cannot go back to before a rejected token",
    r"its attention is outside transformers' attention interface \(ALiBi and older models\)",
    "its decoder counts positions from the padding id, for a whole batch at a time",
    "its own code counts positions from the padding id, as RoBERTa's, and transformers' generate "
    "from 0: what it writes is not what it was trained for",
    r"its config does not say what its layers keep \(transformers raised \w+\)",
    r"its cache layers \([\w, ]+\) keep a state that is not per token",
)
FAMILY, INSTEAD_ = r"[\w.-]+ \(\w+\)", re.escape(INSTEAD)
CACHE = r"a (ragged cache|cache of each row(, one token in a pass)?)"
MESSAGES = (
    rf"{FAMILY} cannot be run exactly: ({'|'.join(REASONS)}); {INSTEAD_}",
    rf"{FAMILY} cannot be checked: no small copy can be built, its code raised \w+; {INSTEAD_}",
    rf"{FAMILY} does not run over {CACHE}: its code raised \w+; {INSTEAD_}",
    rf"{FAMILY} is not exact over {CACHE}: logits differ by \S+ of their spread from a full "
    rf"forward; {INSTEAD_}",
    rf"{FAMILY} contradicts itself: (behind its window )?transformers' generate differs from its "
    r"own forward of the whole text by \S+ of their spread, and no text is the right one; (use a "
    rf"configuration whose window is the whole context|{INSTEAD_})(; {INSTEAD_})?",
    rf"\w+ takes no position_ids, so rows cannot differ in length; {INSTEAD_}",
    rf"{FAMILY} has no output layer of tokens; give a model that writes text",
)
PROMPT, NEW = [3, 7, 11, 5, 9, 3, 7, 11], 12

RUNS = [
    "DeepseekV3ForCausalLM",
    "Gemma4ForCausalLM",
    "LlamaForCausalLM",
    "MarianMTModel",
    "Qwen2VLForConditionalGeneration",
    "T5ForConditionalGeneration",
]
BY_ROW = [
    "BartForCausalLM",
    "BloomForCausalLM",
    "FSMTForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "GPTJForCausalLM",
    "JambaForCausalLM",
    "M2M100ForConditionalGeneration",
    "MambaForCausalLM",
    "NllbMoeForConditionalGeneration",
    "ProphetNetForConditionalGeneration",
    "RwkvForCausalLM",
    "SwitchTransformersForConditionalGeneration",
    "T5GemmaForConditionalGeneration",
]
REFUSED = [
    "BltForCausalLM",
    "CpmAntForCausalLM",
    "PI0ForConditionalGeneration",
    "RobertaForCausalLM",
    "WhisperForConditionalGeneration",
]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers says much about configurations that nobody has trained."""
    monkeypatch.setattr(transformers.logging.get_logger("transformers"), "disabled", True)


def outcome(name: str) -> str:
    """Its backend, or the message that the class is refused with."""
    model = build(name)
    try:
        spec = foretoken.load(model, "lookup", runtime="transformers")
    except RefusedError as error:
        assert any(re.fullmatch(message, str(error)) for message in MESSAGES), error
        return str(error)
    (completion,) = spec.generate([PROMPT], max_new_tokens=NEW, gamma=3)
    whole = model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False)[0].tolist()
    begun = 1 if model.config.is_encoder_decoder else len(PROMPT)
    assert list(completion.tokens) == whole[begun:]
    return spec.target.runtime


@pytest.mark.parametrize("name", RUNS)
def test_a_class_that_runs(name: str) -> None:
    assert outcome(name) == "transformers"


@pytest.mark.parametrize("name", BY_ROW)
def test_a_class_that_runs_row_by_row(name: str) -> None:
    assert outcome(name) == "transformers, row by row"


@pytest.mark.parametrize("name", REFUSED)
def test_a_class_that_is_refused(name: str) -> None:
    assert not outcome(name).startswith("transformers")


@pytest.mark.prove
@pytest.mark.parametrize("name", sorted({*classes()} - {*NOT_BUILT, *RUNS, *BY_ROW, *REFUSED}))
@pytest.mark.filterwarnings("ignore")  # of transformers' own code, at random configurations
def test_every_other_class(name: str) -> None:
    outcome(name)


def test_those_not_tried_are_known() -> None:
    assert {*NOT_BUILT} <= {*classes()}
