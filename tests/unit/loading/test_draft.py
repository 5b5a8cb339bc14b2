"""Drafts by name, by folder and of one's own; what does not fit the target is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

import foretoken
from foretoken.drafters.copying import CopyDrafter
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.drafters.uniform import UniformDrafter
from foretoken.errors import InputError, RefusedError
from foretoken.loading.draft import list_target_copies
from loads import PADDED, refused
from tiny import byte_level, folder, llama, metaspace, t5
from tiny_families import build


def renamed() -> PreTrainedTokenizerFast:
    """The same size of vocabulary, one token of another name."""
    state = json.loads(byte_level().backend_tokenizer.to_str())
    (old,) = (token for token, i in state["model"]["vocab"].items() if i == 300)
    state["model"]["vocab"]["zzz"] = state["model"]["vocab"].pop(old)
    state["model"]["merges"] = [m for m in state["model"]["merges"] if old not in ("".join(m), *m)]
    backend = Tokenizer.from_str(json.dumps(state))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


def test_names_that_are_no_drafters(bare):
    """A mistyped one gets the nearest, one that has moved its new place; others are models."""
    for draft, near in (
        ("look-up", "lookup"),
        ("Lookup", "lookup"),
        ("coppy", "copy"),
        ("non", "none"),
        ("uniforms", "uniform"),
        ("selfie:int4", "self:KIND"),
    ):
        refused(InputError, f"draft is '{draft}'; did you mean '{near}'", bare, draft)
    for draft in ("gpt2", "opt", "t5-small", "owner/lookup", "me/look-up", "C:/a"):
        assert "did you mean" not in refused(InputError, ".", bare, draft)
    for draft in ("lookup+", "lookup+none", "lookup+lookup", "lookup+lookup+self"):
        message = re.escape(f"draft is {draft!r}; give lookup, or lookup+ and a draft model")
        refused(InputError, message, bare, draft)
    for draft in ("uniform+", "uniform+uniform", "uniform+none", "lookup+uniform+lookup"):
        refused(InputError, r"draft is '.*'; give different draft models", bare, draft)
    assert list_target_copies("float32", 5) == ["self:int8", "self:int4", "self:0,2,4"]
    assert list_target_copies("int8", 4) == ["self:int4", "self:0,2,3"]
    assert list_target_copies("int4", 2) == [] and list_target_copies("auto", 1) == [
        "self:int8",
        "self:int4",
    ]


def test_a_folder_may_have_nearly_the_name_of_a_drafter(bare, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder(Path("look-up"), llama(PADDED))
    assert isinstance(foretoken.load(bare, "look-up").drafter, LMDrafter)


# Drafts by name


@pytest.mark.parametrize(
    ("draft", "kind"), [(None, LookupDrafter), ("none", NoDrafter), ("uniform", UniformDrafter)]
)
def test_drafts_by_name(pair, draft, kind):
    spec = foretoken.load(pair[0], draft)
    assert type(spec.drafter) is kind and spec.draft_name == (draft or "lookup")
    completion = spec.generate("It was", max_new_tokens=8, gamma=2, temperature=1.0)[0]
    assert len(completion.tokens) == 8
    mine = LookupDrafter()
    spec = foretoken.load(pair[0], mine)
    assert spec.drafter is mine and spec.draft_name == "LookupDrafter"


# Vocabularies


def test_a_cascade_of_another_vocabulary_is_refused_with_a_token(pair, tmp_path):
    """Of the same size; and of another. An encoder-decoder's draft likewise."""
    other = foretoken.load(folder(tmp_path / "other", llama(PADDED, seed=1), renamed()), "none")
    says = "of the 321 tokens in the two vocabularies, 2 have different ids.*"
    says += "is id (300 in the draft and None|None in the draft and 300) in the target"
    refused(RefusedError, says, pair[0], other)
    unlike = foretoken.load(folder(tmp_path / "unlike", llama(PADDED, seed=1), metaspace()), "none")
    says = "has another tokenizer.*give a draft with the same vocabulary, or 'lookup'"
    refused(RefusedError, says, pair[0], unlike)
    target = folder(tmp_path / "target", t5(320), byte_level())
    draft = folder(tmp_path / "draft", t5(400), metaspace())
    refused(RefusedError, "has another tokenizer", target, draft)


def test_without_two_tokenizers_sizes_must_agree(pair, bare):
    assert foretoken.load(pair[0], llama(PADDED, seed=1))
    assert foretoken.load(bare, llama(PADDED, seed=1))
    refused(RefusedError, "320 output rows and the target 336", bare, llama(320))
    refused(RefusedError, "without both tokenizers", pair[0], llama(320))


@pytest.mark.parametrize("V", [57, 64])
def test_models_in_memory_padded_otherwise_are_taken_at_the_callers_word(V):
    """No guess is beyond the target's ids, and where a text has ids beyond the draft's it makes
    none. That the distribution stays is proved in tests/exact/test_step_law.py."""
    target, draft = llama(61), llama(V, seed=1)
    says = f"{V} output rows and the target 61, .* or same_tokenizer=True if equal ids are"
    refused(RefusedError, says, target, draft)
    spec = foretoken.load(target, draft, same_tokenizer=True)
    prompts, options = [[3, 4], [59, 5, 60]], {"max_new_tokens": 40, "ignore_eos": True}
    plain = foretoken.load(target, "none").generate(prompts, **options)
    fast = spec.generate(prompts, gamma=3, **options)
    assert [c.tokens for c in fast] == [c.tokens for c in plain]
    sampled = spec.generate(prompts, gamma=3, temperature=2.0, seed=3, **options)
    for known, unknown in (fast, sampled):
        assert known.stats.drafted and bool(unknown.stats.drafted) == (V > 60)
        assert all(
            draft_token < min(V, 61) for step in known.steps for draft_token in step.draft_tokens
        )
    assert any(token >= 57 for c in sampled for token in c.tokens)


def test_two_tokenizers_are_compared_whatever_is_said_of_them(pair, bare):
    """One at hand is taken at the caller's word, where both have its ids."""
    says = "the tokenizer has ids up to 319, and LlamaForCausalLM has 300 output rows"
    refused(RefusedError, says, pair[0], llama(300), same_tokenizer=True)
    refused(RefusedError, says, llama(300), pair[1], same_tokenizer=True)
    assert foretoken.load(pair[0], llama(320), same_tokenizer=True)
    assert foretoken.load(bare, llama(320), same_tokenizer=True)
    assert foretoken.load(*pair, same_tokenizer=True)
    other = llama(320), metaspace()
    refused(
        RefusedError, "has another tokenizer", pair[0], folder(bare.parent / "m", *other),
        same_tokenizer=True,
    )  # fmt: skip
    for draft in ("lookup", None, LookupDrafter(), LMDrafter(foretoken.load(bare, "none").target)):
        refused(InputError, "same_tokenizer is True, but", bare, draft, same_tokenizer=True)
    refused(InputError, "same_tokenizer is 1", bare, same_tokenizer=1)
    draft = t5(64)
    refused(
        RefusedError,
        "cannot draft for a decoder-only target",
        llama(61),
        draft,
        same_tokenizer=True,
    )


@pytest.mark.daily
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("swap", [False, True], ids=["target is wider", "draft is wider"])
def test_padded_rows_are_fine(pair, swap, temperature):
    """Also where the target says an id that the draft has no row for: it falls silent there."""
    target, draft = pair[::-1] if swap else pair
    spec = foretoken.load(target, draft)
    options = {"max_new_tokens": 60, "temperature": temperature}
    beyond = 0
    for seed in range(4 if temperature else 1):
        for completion in spec.generate(["It was", "The day"], gamma=3, seed=seed, **options):
            place = next((i for i, token in enumerate(completion.tokens) if token >= 320), None)
            if place is not None and temperature:
                beyond += 1
                spoken = 0
                for step in completion.steps:
                    assert not step.draft_tokens or spoken <= place
                    spoken += len(step.new_tokens)
    assert bool(beyond) == bool(temperature and not swap)
    if not temperature:
        plain = foretoken.load(target, "none").generate("It was", **options)
        assert plain[0].tokens == spec.generate("It was", gamma=3, **options)[0].tokens


@pytest.mark.parametrize("kind", ["causal", "encoder-decoder", "decoder-only"])
def test_a_prompt_with_ids_that_the_draft_lacks(kind, tmp_path):
    V = 330
    causal, seq2seq = (lambda V: llama(V, seed=1)), (lambda V: t5(V, seed=1))
    target = folder(tmp_path / "target", (llama if kind == "causal" else t5)(350), metaspace())
    network = (seq2seq if kind == "encoder-decoder" else causal)(V)
    spec = foretoken.load(target, folder(tmp_path / "draft", network, metaspace()))
    completions = spec.generate([[5, 340], [5, 6], [340]], gamma=2, max_new_tokens=4)
    drafted = [c.stats.drafted for c in completions]
    assert drafted[0] == drafted[2] == 0 and drafted[1]
    again = spec.generate([5, 6], gamma=2, max_new_tokens=4)
    assert again[0].tokens == completions[1].tokens


def test_a_source_longer_than_the_drafts_encoder():
    spec = foretoken.load(t5(64), build("BART"))  # of 128 positions
    long, short = spec.generate([[5] * 140, [5] * 4], gamma=2, max_new_tokens=5)
    assert long.stats.drafted == 0 and short.stats.drafted


# Kinds of models


def test_a_decoder_only_model_drafts_for_an_encoder_decoder():
    spec = foretoken.load(t5(64).double(), llama(64).double())
    plain = foretoken.load(t5(64).double(), "none")
    prompts = [[5, 6, 7], [8]]
    fast = spec.generate(prompts, gamma=3, max_new_tokens=12)
    slow = plain.generate(prompts, max_new_tokens=12)
    assert [c.tokens for c in fast] == [c.tokens for c in slow]
    assert all(c.stats.drafted for c in fast)


def test_one_of_several_drafts_drafts_in_each_step(bare):
    spec, alone = (foretoken.load(bare, draft) for draft in ("lookup+uniform+copy", "none"))
    assert spec.draft_name == "lookup+uniform+copy"
    assert [type(part) for part in spec.drafter.parts] == [UniformDrafter, CopyDrafter]
    prompts = [[5, 6, 7, 8, 9, 10] * 4, [3] * 9, [4, 2, 8]]
    for gamma in (None, 2):
        fast = spec.generate(prompts, max_new_tokens=40, gamma=gamma, temperature=0.0)
        slow = alone.generate(prompts, max_new_tokens=40, temperature=0.0)
        assert [each.tokens for each in fast] == [each.tokens for each in slow]
        assert any(each.stats.drafted for each in fast)
    assert all(step.grade == 0 for each in fast for step in each.steps)  # gamma is fixed
    assert all(each.measured for each in spec.costing.alternatives)


def test_a_lookup_stands_in_front_of_a_draft(bare):
    spec, alone = (foretoken.load(bare, draft) for draft in ("lookup+uniform", "uniform"))
    assert spec.draft_name == "lookup+uniform" and type(spec.drafter) is type(alone.drafter)
    prompt = [5, 6, 7, 8, 9, 10] * 4
    steps = spec.generate([prompt], max_new_tokens=64, gamma=3)[0].steps
    assert any(step.predicted for step in steps)
    assert not any(step.predicted for step in alone.generate([prompt], max_new_tokens=12)[0].steps)
