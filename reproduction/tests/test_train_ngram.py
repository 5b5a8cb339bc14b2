"""The n-gram trainer against Kneser-Ney written down directly, with dictionaries."""

import gzip
from collections import Counter, defaultdict

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from foretoken.errors import InputError
from foretoken.train.corpus import hold_out
from reproduction.ngram import NGram, fingerprint
from reproduction.train_ngram import (
    bits_per_token,
    fit,
    fit_from_text,
    held_out_bits,
    held_out_bits_of_text,
)
from tiny import byte_level

V = 6


class Naive:
    """Interpolated modified Kneser-Ney in float64, straight from the definition."""

    def __init__(self, sequences, order, separator=None):
        self.raw = [Counter() for _ in range(order + 1)]
        left = defaultdict(set)  # what stood in front; None for a start
        for s in sequences:
            for k in range(1, order + 1):
                for i in range(len(s) - k + 1):
                    if separator in s[i + 1 : i + k - 1]:
                        continue
                    gram = tuple(s[i : i + k])
                    self.raw[k][gram] += 1
                    cut = i == 0 or (k > 1 and s[i] == separator)
                    left[gram].add(None if cut else s[i - 1])
        self.counts = [{g: len(left[g]) for g in of} for of in self.raw[:order]]
        self.counts.append(dict(self.raw[order]))

    def distribution(self, context):
        k = len(context) + 1
        below = self.distribution(context[1:]) if context else np.full(V, 1 / V)
        counts = np.array([self.counts[k].get((*context, x), 0) for x in range(V)])
        if not counts.any():
            return below
        D = discounts(Counter(self.counts[k].values()))[np.minimum(counts, 3)]
        return (counts - D + D.sum() * below) / counts.sum()


def discounts(n):
    if not all(n[c] for c in (1, 2, 3, 4)):
        return np.array([0, 0.5, 0.5, 0.5])
    y = n[1] / (n[1] + 2 * n[2])
    D = [c - (c + 1) * y * n[c + 1] / n[c] for c in (1, 2, 3)]
    return np.array([0, *(min(max(d, 0.1), c) for c, d in enumerate(D, 1))])


def text(length, seed=0, vocab_size=V):
    """A chain that likes to go on counting, so that contexts matter."""
    rng = np.random.default_rng(seed)
    ids = [0]
    for jump in rng.choice(vocab_size, length - 1, p=skew(vocab_size)):
        ids.append(int(ids[-1] + 1 + jump) % vocab_size)
    return ids


def skew(n):
    weights = 0.5 ** np.arange(n)
    return weights / weights.sum()


def contexts(order, size=V):
    return [c for k in range(order) for c in np.ndindex(*[size] * k)]


def test_a_bigram_by_hand():
    """0 was seen behind 1 and at the start, 1 behind 0; after 0 came 1 twice, after 1 came 0."""
    table = fit([[0, 1, 0, 1]], 2, 2)
    unigram = np.array([1.5, 0.5]) / 3 + 1 / 3 / 2
    assert table.distribution([]) == pytest.approx(unigram, abs=1e-7)
    assert table.distribution([0]) == pytest.approx(
        [0.25 * unigram[0], 0.75 + 0.25 * unigram[1]], abs=1e-7
    )
    assert table.distribution([1]) == pytest.approx(
        [0.5 + 0.5 * unigram[0], 0.5 * unigram[1]], abs=1e-7
    )


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("separator", [None, 5])
def test_distributions_are_kneser_ney_s_and_sum_to_one(order, separator):
    sequences = [text(90, 1), [], text(60, 2), [3], text(2, 3)]
    table = fit(sequences, V, order, separator=separator)
    naive = Naive(sequences, order, separator)
    for context in contexts(order):
        q = table.distribution(context)
        assert abs(q.sum(dtype=np.float64) - 1) < 1e-6
        assert (q > 0).all()
        np.testing.assert_allclose(q, naive.distribution(context), atol=1e-6)


@pytest.mark.parametrize("dtype", [np.uint16, np.int64])
def test_an_array_is_one_sequence_or_rows_of_them(dtype):
    ids = text(60)
    same(fit(np.array(ids, dtype), V, 3), fit([ids], V, 3))
    same(
        fit(np.array(ids, dtype).reshape(3, 20), V, 3), fit([ids[:20], ids[20:40], ids[40:]], V, 3)
    )


def same(a: NGram, b: NGram):
    assert all(np.array_equal(a.distribution(c), b.distribution(c)) for c in contexts(a.order))


def test_no_ngram_reaches_across_a_separator():
    """With 5 between them, 0 is never told what stood before the 5."""
    apart = fit(np.array([1, 2, 5, 0, 3]), V, 4, separator=5)
    through = fit(np.array([1, 2, 5, 0, 3]), V, 4)
    assert np.array_equal(apart.distribution([1, 2, 5]), apart.distribution([5]))
    assert through.distribution([1, 2, 5])[0] > through.distribution([5])[0]
    # but a text's first token follows it
    assert apart.distribution([5])[0] > apart.distribution([2])[0]
    assert apart.distribution([1, 2])[5] > apart.distribution([2])[5]  # and its end is predicted


def test_an_order_longer_than_the_text_saves_and_loads(tmp_path):
    table = fit([[1, 2]], V, 5)
    table.save(tmp_path / "t")
    assert NGram.load(tmp_path / "t").order == 5
    same(fit([[1, 2]], V, 2), NGram(table.unigram, table.levels[:1]))
    assert table.distribution([3, 1, 2, 1]).argmax() == 2


@pytest.mark.parametrize("order", [1, 2, 4])
@pytest.mark.parametrize("separator", [None, 5])
def test_bits_are_those_of_the_distributions(order, separator):
    table = fit([text(300, 5)], V, order, separator=separator)
    sequences = [text(80, 6), text(30, 7)]
    bits = []
    for s in sequences:
        for i, x in enumerate(s):
            past = s[:i]
            if separator in past:
                past = past[len(past) - 1 - past[::-1].index(separator) :]
            bits.append(-np.log2(table.distribution(past[max(0, len(past) - order + 1) :])[x]))
    measured = bits_per_token(table, sequences, separator=separator)
    assert measured == pytest.approx(np.mean(bits), abs=1e-5)


@pytest.mark.parametrize(
    ("ids", "order", "message"),
    [
        ([[0, 1]], 0, "order is 0"),
        ([], 2, "there are no ids"),
        ([[], []], 2, "there are no ids"),
        ([[0, V]], 2, "ids run from 0 to 6"),
        ([[0, -1]], 2, "ids run from -1"),
    ],
)
def test_what_cannot_be_fitted_is_refused(ids, order, message):
    with pytest.raises(InputError, match=message):
        fit(ids, V, order)


def words() -> PreTrainedTokenizerFast:
    vocabulary = {"<end>": 0, "<?>": 1, "a": 2, "b": 3, "c": 4}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<?>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="<?>")


def test_text_from_a_folder_or_a_file(tmp_path):
    (tmp_path / "1.txt").write_text("a b c\na b")
    with gzip.open(tmp_path / "2.txt.gz", "wt") as file:
        file.write("c c")
    tokenizer = words()
    table = fit_from_text(tmp_path, tokenizer, 3)
    assert table.fingerprint == fingerprint(tokenizer.get_vocab())
    expected = fit(np.array([0, 2, 3, 4, 2, 3, 0, 4, 4, 0]), 5, 3, separator=0)
    assert all(
        np.array_equal(table.distribution(c), expected.distribution(c)) for c in contexts(3, 5)
    )
    alone = fit_from_text(tmp_path / "2.txt.gz", tokenizer, 2)
    assert alone.distribution([0]).argmax() == 4


def test_bits_on_text_that_is_held_out(tmp_path):
    """Of two texts the second, under a table of the first; of sequences the first."""
    (tmp_path / "1.txt").write_text("a b a b c")
    (tmp_path / "2.txt").write_text("a b c")
    train, unseen = np.array([0, 2, 3, 2, 3, 4, 0]), np.array([0, 2, 3, 4, 0])
    expected = bits_per_token(fit(train, 5, 2, separator=0), unseen, separator=0)
    assert held_out_bits_of_text(tmp_path, words(), 2) == pytest.approx(expected)
    expected = bits_per_token(fit([[2, 3]] * 15, 5, 2), [[3, 4], [4]])
    sequences = [[3, 4], *[[2, 3]] * 15, [4]]
    assert held_out_bits(sequences, 5, 2) == pytest.approx(expected)


def test_nothing_to_hold_out(tmp_path):
    (tmp_path / "a.txt").write_text("a b")  # a sixteenth of it is nothing
    assert held_out_bits_of_text(tmp_path, words(), 2) is None
    assert held_out_bits([[1, 2]], 5, 2) is None and held_out_bits([[], [1]], 5, 2) is None


def test_targets_of_pairs_begin_where_a_decoder_does(tmp_path):
    tokenizer = byte_level(280)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {tokenizer.eos_token}", special_tokens=[(tokenizer.eos_token, 0)]
    )
    targets = [f"the sea {i % 3}" for i in range(20)]
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{i}\t{target}\n" for i, target in enumerate(targets)))
    ids = [tokenizer(target).input_ids for target in targets]
    assert all(row[-1] == tokenizer.eos_token_id for row in ids)
    size = max(tokenizer.get_vocab().values()) + 1
    for order, start in ((1, []), (2, [tokenizer.pad_token_id])):
        sequences = [[*start, *row] for row in ids]
        found, expected = fit_from_text(path, tokenizer, order), fit(sequences, size, order)
        assert found.fingerprint == fingerprint(tokenizer.get_vocab())
        contexts = [sequence[:i] for sequence in sequences[:3] for i in range(1, len(sequence))]
        assert all(
            np.array_equal(found.distribution(c), expected.distribution(c)) for c in contexts
        )
        train, held_out = hold_out(sequences)
        table = fit(train, size, order)
        costs = [
            -np.log2(table.distribution(row[:i])[row[i]])
            for row in held_out
            for i in range(len(start), len(row))  # the start is given
        ]
        assert held_out_bits_of_text(path, tokenizer, order) == pytest.approx(np.mean(costs))
    (tmp_path / "sources.jsonl").write_text('{"source": "a"}\n')
    with pytest.raises(InputError, match="sources.jsonl has no targets"):
        fit_from_text(tmp_path / "sources.jsonl", tokenizer, 1)
