"""N-gram tables with whole models: the target's own texts, whatever a table guesses, and files that
belong to another target."""

from __future__ import annotations

import pytest

import foretoken
from foretoken.errors import InputError
from loads import refused
from pairs import PROMPTS, V, assert_greedy, speculator, stock, target
from reproduction.ngram import NGramDrafter, fingerprint
from reproduction.train_ngram import fit
from tiny import TEXT, byte_level, folder, llama, metaspace

LIMIT = 24


def bigrams(name: str) -> NGramDrafter:
    """Bigrams of the target's greedy texts: some guesses are right, some are not."""
    return NGramDrafter(fit([stock(target(name), prompt, LIMIT) for prompt in PROMPTS], V, 2))


@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_greedy_texts_are_the_targets(name: str) -> None:
    pair = speculator(target(name), bigrams(name))
    for gamma in 1, 4:
        texts = pair.generate(PROMPTS, max_new_tokens=LIMIT, gamma=gamma)
        for prompt, text in zip(PROMPTS, texts, strict=True):
            assert_greedy(text, target(name), prompt, LIMIT)
        assert 0 < sum(x.stats.accepted for x in texts) < sum(x.stats.drafted for x in texts)


def test_coupled_texts_do_not_depend_on_the_table() -> None:
    how = {"max_new_tokens": LIMIT, "temperature": 1.0, "seed": 3, "rule": "coupled"}
    pair = speculator(target("Llama"), bigrams("Llama"))
    plain, *others = (pair.generate(PROMPTS, gamma=gamma, **how) for gamma in (0, 1, 4))
    for texts in others:
        assert [text.tokens for text in texts] == [text.tokens for text in plain]


def test_sampled_texts_are_the_same_on_recorded_graphs() -> None:
    how = {"max_new_tokens": LIMIT, "temperature": 0.9, "top_p": 0.95, "seed": 3, "gamma": 3}
    texts = [
        speculator(target("Llama"), bigrams("Llama"), runtime=runtime).generate(PROMPTS, **how)
        for runtime in ("transformers", "graphs")
    ]
    assert [x.tokens for x in texts[0]] == [x.tokens for x in texts[1]]


def test_a_file(tmp_path) -> None:
    ids = byte_level()(TEXT).input_ids
    model = folder(tmp_path / "target", llama(320), byte_level())
    mine, other = tmp_path / "mine.safetensors", tmp_path / "other.safetensors"
    fit([ids], 320, 3, fingerprint=fingerprint(byte_level().get_vocab())).save(mine)
    fit([ids], 320, 3, fingerprint=fingerprint(metaspace().get_vocab())).save(other)
    spec = foretoken.load(model, f"reproduction.ngram:{mine}")
    assert isinstance(spec.drafter, NGramDrafter)
    assert spec.draft_name == f"reproduction.ngram:{mine}"
    for temperature in (0.0, 1.0):
        options = {"gamma": 3, "temperature": temperature, "max_new_tokens": 12}
        assert spec.generate("It was", **options)[0].stats.drafted
    refused(InputError, "another tokenizer", model, f"reproduction.ngram:{other}")
    refused(InputError, "there is no n-gram file", model, "reproduction.ngram:missing")
    refused(InputError, "^no file is given", model, "reproduction.ngram:")
    wide = llama(336)
    says = "is for 320 tokens, the target has 336"
    refused(InputError, says, wide, f"reproduction.ngram:{mine}")
