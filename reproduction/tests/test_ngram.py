"""The n-gram table, its file, and the drafter that guesses from it. Tables are made by hand."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from foretoken.drafters.base import Draw
from foretoken.errors import InputError
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.keys import SequenceKey
from reproduction.ngram import Level, NGram, NGramDrafter, fingerprint


def level(starts, tokens, weights, backoff) -> Level:
    return Level(
        np.array(starts, np.uint32),
        np.array(tokens, np.uint32),
        np.array(weights, np.float32),
        np.array(backoff, np.float32),
    )


def table(fingerprint=None) -> NGram:
    """V = 4, order 3. Bigrams (0,1) (0,2) (1,2) are 0, 1, 2; the one trigram is (0,1,2)."""
    bigrams = level([0, 2, 3, 3, 3], [1, 2, 2], [0.5, 0.25, 0.75], [0.25, 0.25, 1, 1])
    trigrams = level([0, 1, 1, 1], [2], [0.5], [0.5, 1, 1])
    return NGram(np.array([0.5, 0.25, 0.125, 0.125], np.float32), [bigrams, trigrams], fingerprint)


def drafter_at(prompts, order=3) -> NGramDrafter:
    full = table()
    drafter = NGramDrafter(NGram(full.unigram, full.levels[: order - 1]))
    drafter.start(list(range(len(prompts))), prompts, None)
    return drafter


def draws(B, params, seed=1, length=6):
    return Draw([SequenceKey(seed, b) for b in range(B)], [length] * B, [params] * B)


AFTER_0 = [0.125, 0.5625, 0.28125, 0.03125]
UNIGRAM = [0.5, 0.25, 0.125, 0.125]


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ([], UNIGRAM),
        ([0], AFTER_0),
        ([3], UNIGRAM),  # never followed by anything
        ([99], UNIGRAM),  # an id of the target that the table has not
        ([99, 0], AFTER_0),
        ([2, 0], AFTER_0),  # (2, 0) never occurred: back off to (0)
        ([0, 2], UNIGRAM),  # (0, 2) and (2) occurred and were never followed
        ([0, 1], [0.0625, 0.03125, 0.890625, 0.015625]),
        ([3, 3, 0, 1], [0.0625, 0.03125, 0.890625, 0.015625]),  # only the last two count
    ],
)
def test_a_distribution_by_hand(context, expected):
    q = table().distribution(context)
    assert q.dtype == np.float32
    assert q.tolist() == expected  # every number is a binary fraction
    assert q.sum() == 1


def test_greedy_draft_tokens_are_certain_and_the_lowest_on_ties():
    drafter = drafter_at([[0], [3], []])
    draft = drafter.propose([3, 1, 2], draws(3, SamplingParams(temperature=1e-6)))
    assert draft.q is None and draft.calls == 0
    assert draft.lengths.tolist() == [3, 1, 2]
    # after 0 comes 1, after (0, 1) 2, after (1, 2) the unigram's 0
    assert draft.tokens.tolist() == [[1, 2, 0], [0, 0, 0], [0, 1, 0]]
    even = NGramDrafter(NGram(np.array([0.2, 0.4, 0.4], np.float32), []))
    even.start([0], [[2]], None)
    assert even.propose([1], draws(1, SamplingParams())).tokens.tolist() == [[1]]


def test_rows_join_behind_commit_and_leave():
    drafter = drafter_at([[0], [1]])
    drafter.start([2], [[3]], None)
    greedy = SamplingParams()
    assert drafter.propose([1, 1, 1], draws(3, greedy)).tokens.tolist() == [[1], [2], [0]]
    drafter.leave([1])
    drafter.commit([[1], [0, 3, 0, 0]])
    assert drafter.propose([1, 1], draws(2, greedy)).tokens.tolist() == [[2], [1]]
    drafter.leave([0, 1])
    assert drafter.propose([], draws(0, greedy)).tokens.shape == (0, 0)


def test_a_file_gives_the_table_back(tmp_path):
    path = tmp_path / "deep" / "table.safetensors"
    table("abc").save(path)
    again = NGram.load(path, vocab_size=4, fingerprint="abc")
    assert (again.order, again.vocab_size, again.fingerprint) == (3, 4, "abc")
    for context in ([], [0], [0, 1], [1, 2]):
        assert np.array_equal(again.distribution(context), table().distribution(context))
    assert [p.name for p in path.parent.iterdir()] == ["table.safetensors"]
    assert NGram.load(path).vocab_size == 4


def test_a_table_of_another_tokenizer_is_refused(tmp_path):
    path = tmp_path / "table"
    table("abc").save(path)
    with pytest.raises(InputError, match="another tokenizer"):
        NGram.load(path, vocab_size=4, fingerprint="xyz")
    with pytest.raises(InputError, match="for 4 tokens, the target has 5"):
        NGram.load(path, vocab_size=5)
    with pytest.raises(InputError, match="for 4 tokens, the target has 3"):
        NGram.load(path, vocab_size=3, fingerprint="abc")


def test_a_padded_target_gets_no_draft_token_from_the_padding(tmp_path):
    path = tmp_path / "table"
    table("abc").save(path)
    wide = NGram.load(path, vocab_size=6, fingerprint="abc")
    assert wide.distribution([5, 0]).tolist() == [*AFTER_0, 0, 0]
    drafter = NGramDrafter(wide)
    drafter.start([0], [[5]], None)
    draft = drafter.propose([2], draws(1, SamplingParams(2.0)))
    assert draft.q is not None and not draft.q[..., 4:].any()


def broken(path, form="foretoken.ngram", header=None, **changes):
    tensors = {"unigram": table().unigram}
    for k, made in enumerate(table().levels, 2):
        tensors |= {f"{k}.{name}": getattr(made, name) for name in Level.__slots__}
    facts = {"version": 1, "order": 3, "vocab_size": 4, "fingerprint": None}
    for name, value in changes.items():
        (facts if name in facts else tensors)[name] = value
    save_file(tensors, path, metadata={form: header or json.dumps(facts)})
    return path


@pytest.mark.parametrize(
    "changes",
    [
        {"form": "another"},
        {"version": 2},
        {"order": 4},
        {"order": "three"},
        {"vocab_size": 5},
        {"2.starts": np.array([0, 2, 1, 3, 3], np.uint32)},
        {"2.starts": np.array([0, 2, 3], np.uint32)},
        {"2.tokens": np.array([1, 2, 4], np.uint32)},
        {"3.weights": np.array([np.nan], np.float32)},
        {"unigram": np.array([2, -1, 0, 0], np.float32)},
        {"unigram": np.array([[1, 0, 0, 0]], np.float32)},
        {"unigram": np.array([1, 0, 0, 0], np.float64)},
        {"unigram": np.array([1, 0, 0, 0], np.int32)},
        {"2.starts": np.array([[0, 2, 3, 3, 3]], np.uint32)},
        {"2.starts": np.array([0, 2, 3, 3, 3], np.float32)},
        {"2.starts": np.zeros((), np.uint32)},
        {"2.tokens": np.array([1, 2, 3], np.int64)},
        {"2.tokens": np.array([True, False, True])},
        {"2.backoff": np.array([1, 1, 1, 1], np.int32)},
        {"order": 1},
        {"order": -1},
        {"order": True},
        {"fingerprint": []},
        {"header": "[]"},
        {"header": "3"},
        {"header": "null"},
        {"header": '"version"'},
        {"header": "[" * 100_000},
        {"header": "{"},
    ],
)
def test_a_foreign_or_broken_file_is_named(tmp_path, changes):
    path = broken(tmp_path / "bad", **changes)
    with pytest.raises(InputError, match="bad") as caught:
        NGram.load(path)
    assert "\n" not in str(caught.value)


def test_a_missing_or_cut_file_is_named(tmp_path):
    assert NGram.load(broken(tmp_path / "whole")).order == 3
    with pytest.raises(InputError, match="there is no n-gram file .*gone"):
        NGram.load(tmp_path / "gone")
    (tmp_path / "text").write_text("not a table")
    (tmp_path / "cut").write_bytes((tmp_path / "whole").read_bytes()[:-8])
    for name in ("text", "cut"):
        with pytest.raises(InputError, match=f"{name} cannot be read"):
            NGram.load(tmp_path / name)


def test_a_fingerprint_is_the_vocabulary_s():
    assert fingerprint({"a": 0, "b": 1}) == fingerprint({"b": 1, "a": 0})
    assert len({fingerprint(v) for v in ({"a": 0, "b": 1}, {"a": 1, "b": 0}, {"a": 0})}) == 3
