"""Every class of transformers that generates text runs and writes what its own `generate` writes,
or is refused in our words: no text of an error that its own code raised reaches a user."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import transformers

import families
from census import Verdict, classes, judge
from foretoken.kernels import library
from foretoken.models.stock.cache import INSTEAD

# Whole messages. What varies in them is names and numbers, never a sentence of somebody else's
REASONS = (
    r"it reads \w+, not text",
    "it has no head that generates text; load its ForCausalLM class",
    "its config says is_decoder false: it fills in masked words; set is_decoder",
    r"its own code takes no masks in \w+; set attn_implementation to 'eager'",
    "its attention changes with how much it reads at once; set attention_type",
    "its own code counts positions from the padding id, as RoBERTa's, and transformers' generate "
    "from 0: what it writes is not what it was trained for",
    "its attention hashes by random numbers, so that it writes another text each time; set "
    "hash_seed and num_buckets in its config",
    r"its config does not say what its layers keep \(transformers raised \w+\)",
    r"its cache layers \([\w, ]+\) keep a state that is not per token",
)
FAMILY, INSTEAD_ = r"[\w.-]+ \(\w+\)", re.escape(INSTEAD)
CACHE = r"a (ragged cache|cache of each row)"
SINGLE = "(at most it scores single tokens a pass, so that drafts save nothing; )?"
MESSAGES = (
    rf"{FAMILY} cannot be run exactly: ({'|'.join(REASONS)}); {INSTEAD_}",
    rf"{FAMILY} keeps states beside keys and values: runtime='transformers' takes them back",
    rf"{FAMILY} cannot be checked: no small copy can be built, its code raised \w+; {INSTEAD_}",
    rf"{FAMILY} does not run over {CACHE}: its code raised \w+; {SINGLE}{INSTEAD_}",
    rf"{FAMILY} is not exact over {CACHE}: logits differ by \S+ of their spread from a full "
    rf"forward; {SINGLE}{INSTEAD_}",
    rf"{FAMILY} contradicts itself: (behind its window )?transformers' generate differs from its "
    r"own forward of the whole text by \S+ of their spread, and no text is the right one; (use a "
    rf"configuration whose window is the whole context|{INSTEAD_})",
    rf"{FAMILY} has no output layer of tokens; give a model that writes text",
    # of prompts with media
    r"prompt \d holds [\w, ]+: its generate changes the prompt that it is given; "
    "give (text|what its processor makes of a sound or picture)",
)
FORMS = [*families.FORMS]  # the best first
RESULTS = json.loads(families.RESULT.read_text())
LARGE = 40  # seconds that the census took: such a class takes gigabytes
KNOWN = {each["name"]: Verdict(**each) for each in RESULTS["families"]}

RUNS = [
    "BartForCausalLM",
    "BloomForCausalLM",
    "CohereCompassForCausalLM",
    "DeepseekV3ForCausalLM",
    "GPTJForCausalLM",
    "Gemma3nForCausalLM",
    "Gemma4ForCausalLM",
    "Gemma4UnifiedForConditionalGeneration",
    "HrmTextForCausalLM",
    "JambaForCausalLM",
    "LlamaForCausalLM",
    "M2M100ForConditionalGeneration",
    "MarianMTModel",
    "NllbMoeForConditionalGeneration",
    "NemotronHForCausalLM",
    "Lfm2ForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen2VLForConditionalGeneration",
    "T5ForConditionalGeneration",
]
BY_ROW = [
    "RwkvForCausalLM",
    "xLSTMForCausalLM",
]
WITH_MEDIA = [  # pictures of several shapes, sounds, and pictures beside the text
    "Blip2ForConditionalGeneration",
    "MllamaForConditionalGeneration",
    "MoonshineStreamingForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
    "UdopForConditionalGeneration",
]
REFUSED = [
    "BlipForConditionalGeneration",
    "FSMTForConditionalGeneration",
    "PaliGemmaForConditionalGeneration",
    "ReformerModelWithLMHead",
    "RobertaForCausalLM",
]
NO_TEXT = ["PI0ForConditionalGeneration"]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers says much about configurations that nobody has trained."""
    monkeypatch.setattr(transformers.logging.get_logger("transformers"), "disabled", True)


def alone(name: str) -> Verdict:
    """Judged in a process of its own: what it leaves behind in memory goes with it."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(judge, name).result()


def judged(name: str) -> Verdict:
    """It is refused in our words, or is as before or better."""
    known = KNOWN[name]
    verdict = alone(name) if known.seconds > LARGE else judge(name)
    if verdict.outcome == "refused":
        assert any(re.fullmatch(message, verdict.reason or "") for message in MESSAGES)
    assert verdict.outcome == known.outcome or verdict.outcome == "equal", verdict
    if known.form is not None and verdict.outcome == "equal":
        assert FORMS.index(verdict.form or "") <= FORMS.index(known.form)
    if known.native == "equal" and library.FILE.exists():
        assert verdict.native == "equal"
    return verdict


SLOW = (  # seconds each
    *("Lfm2ForCausalLM", "Qwen2VLForConditionalGeneration", "Qwen3NextForCausalLM"),
    *("Gemma3nForCausalLM", "GPTJForCausalLM"),
    *("FSMTForConditionalGeneration", "PaliGemmaForConditionalGeneration"),
    *("Qwen3VLForConditionalGeneration", "SmolVLMForConditionalGeneration"),
    "UdopForConditionalGeneration",
)


def quick(names: Iterable[str]) -> list[Any]:
    """The names, of which slow ones are for `make prove`."""
    return [pytest.param(n, marks=pytest.mark.prove if n in SLOW else ()) for n in names]


@pytest.mark.parametrize("name", quick(RUNS))
def test_a_class_that_runs(name: str) -> None:
    assert judged(name).form == "transformers"


@pytest.mark.parametrize("name", quick(BY_ROW))
def test_a_class_that_runs_row_by_row(name: str) -> None:
    verdict = judged(name)
    assert verdict.outcome == "equal" and "row by row" in (verdict.form or "")


@pytest.mark.parametrize("name", quick(WITH_MEDIA))
def test_a_class_with_pictures_or_sounds(name: str) -> None:
    assert judged(name).outcome == "equal"


@pytest.mark.parametrize("name", quick(REFUSED))
def test_a_class_that_is_refused(name: str) -> None:
    assert judged(name).outcome == "refused"


@pytest.mark.parametrize("name", NO_TEXT)
def test_a_class_that_writes_no_text(name: str) -> None:
    assert judged(name).outcome == "no text"


@pytest.mark.prove
@pytest.mark.parametrize(
    "name", sorted({*KNOWN} - {*RUNS, *BY_ROW, *REFUSED, *WITH_MEDIA, *NO_TEXT})
)
@pytest.mark.filterwarnings("ignore")  # of transformers' own code, at random configurations
def test_every_other_class(name: str) -> None:
    judged(name)


def test_every_class_is_known() -> None:
    assert {*KNOWN} == {*classes()}, "run `make families`"
    assert not {each.outcome for each in KNOWN.values()} & {"differs", "failed"}


def test_the_native_decoder_serves_dense_families_and_says_what_others_have() -> None:
    said = [each.native for each in KNOWN.values() if each.native]
    assert said.count("equal") >= 160
    assert not any("raised" in each for each in said)


def test_the_page_is_made_of_the_results() -> None:
    assert families.PAGE.read_text() == families.page(RESULTS), "run `make families`"
