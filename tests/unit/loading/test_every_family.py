"""Every class of transformers that generates text runs and writes what its own `generate` writes,
or is refused in our words: no text of an error that its own code raised reaches a user."""

from __future__ import annotations

import json
import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import transformers

import families
from census import Verdict, classes, judge
from foretoken.kernels import library
from foretoken.models.stock.cache import ALTERNATIVES_HINT

# Whole messages. What varies in them is names and numbers, never a sentence of somebody else's
REASONS = (
    r"its input is \w+, not token ids",
    "it has no language model head; load its ForCausalLM class",
    "its config sets is_decoder to false, to fill in masked tokens; set it to true",
    r"its own code takes no masks with \w+; set attn_implementation to 'eager'",
    "its block-sparse attention depends on the block length; set attention_type",
    "its own code counts positions from the padding id, as in RoBERTa, but transformers' "
    "generate counts positions from 0, for which the model was not trained",
    "its attention hashes with random numbers, so its output changes from call to call; set "
    "hash_seed and num_buckets in its config",
    r"transformers cannot make a cache from its config \(\w+\)",
    r"its cache layers \([\w, ]+\) do not have one entry per token",
)
FAMILY, INSTEAD_ = r"[\w.-]+ \(\w+\)", re.escape(ALTERNATIVES_HINT)
CACHE = r"a (ragged cache|cache per sequence)"
SINGLE = "(it scores at most one token per forward pass, so speculative decoding saves nothing; )?"
MESSAGES = (
    rf"{FAMILY} cannot be run exactly: ({'|'.join(REASONS)}); {INSTEAD_}",
    rf"{FAMILY} has recurrent states, which this backend cannot roll back; use "
    "runtime='transformers'",
    rf"{FAMILY} cannot be checked: no small copy can be built, its code raised \w+; {INSTEAD_}",
    rf"{FAMILY} does not run over {CACHE}: its code raised \w+; {SINGLE}{INSTEAD_}",
    rf"{FAMILY} is not exact over {CACHE}: logits differ by \S+ of their spread from a full "
    rf"forward; {SINGLE}{INSTEAD_}",
    rf"{FAMILY} contradicts itself: (beyond its window )?the logits of transformers' generate "
    r"differ from the logits of its own full forward by \S+ of their spread; (use a "
    rf"configuration whose window is the whole context|{INSTEAD_})",
    rf"{FAMILY} has no output layer; give a model with a language model head",
    # of prompts with media
    r"prompt \d contains [\w, ]+: its generate changes the prompt that it is given; "
    "give (text|the output of the target's processor for an image or audio)",
)
FORMS = [*families.FORMS]  # the best first
RESULTS = json.loads(families.RESULT.read_text())
LARGE = 10  # seconds that the census took: such a class takes gigabytes, which a worker would keep
KNOWN = {each["name"]: Verdict(**each) for each in RESULTS["families"]}
DAILY = (  # of each outcome and way to run
    *("LlamaForCausalLM", "T5ForConditionalGeneration", "JambaForCausalLM", "xLSTMForCausalLM"),
    *("MllamaForConditionalGeneration", "MoonshineStreamingForConditionalGeneration"),
    *("BlipForConditionalGeneration", "RobertaForCausalLM", "PI0ForConditionalGeneration"),
)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers says much about configurations that nobody has trained."""
    monkeypatch.setattr(transformers.logging.get_logger("transformers"), "disabled", True)


def alone(name: str) -> Verdict:
    """Judged in a process of its own: what it leaves behind in memory goes with it."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(judge, name).result()


def require_as_known(name: str) -> None:
    """It is refused in our words, or is as before or better."""
    known = KNOWN[name]
    verdict = alone(name) if known.seconds > LARGE else judge(name)
    if verdict.outcome == "refused":
        assert any(re.fullmatch(message, verdict.reason or "") for message in MESSAGES)
    assert verdict.outcome == known.outcome or verdict.outcome == "equal", verdict
    if known.form is not None and verdict.outcome == "equal":
        assert FORMS.index(verdict.form or "") <= FORMS.index(known.form)
    if known.native == "equal" and library.LIBRARY_FILE.exists():
        assert verdict.native == "equal"


@pytest.mark.daily(*DAILY)
@pytest.mark.parametrize("name", sorted(KNOWN))
@pytest.mark.filterwarnings("ignore")  # of transformers' own code, at random configurations
def test_every_class(name: str) -> None:
    require_as_known(name)


def test_every_class_is_known() -> None:
    assert {*KNOWN} == {*classes()}, "run `make families`"
    assert not {each.outcome for each in KNOWN.values()} & {"differs", "failed"}


def test_the_native_decoder_serves_dense_families_and_says_what_others_have() -> None:
    said = [each.native for each in KNOWN.values() if each.native]
    assert said.count("equal") >= 160
    assert not any("raised" in each for each in said)


def test_the_page_is_made_of_the_results() -> None:
    assert families.PAGE.read_text() == families.page(RESULTS), "run `make families`"
