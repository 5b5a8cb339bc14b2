"""A draft of another vocabulary as a model of the target's ids, which reads nothing twice."""

from __future__ import annotations

import pytest
import torch

import hybrids
import pairs
from foretoken.costing import stored_costs
from foretoken.drafters.lm import LMDrafter
from foretoken.models.stock.model import CausalModel
from foretoken.models.vocabularies.translated import SlidingContext, TextDrafting, TranslatedModel
from foretoken.models.vocabularies.vocabulary import Vocabulary, VocabularyMap
from oracle import random_model
from table import TableModel

pytestmark = pytest.mark.daily

V = 5
Q = random_model(1, V)


class Counting(TableModel):
    """Counts what it reads."""

    read = 0

    def score(self, blocks, need):
        self.read += sum(map(len, blocks))
        assert self.context is None or all(
            len(text) + len(block) <= self.context
            for text, block in zip(self._texts, blocks, strict=True)
        )
        return super().score(blocks, need)


def following(texts, **options) -> tuple[SlidingContext, Counting]:
    model = Counting(Q, V, **options)
    follower = SlidingContext(model)
    follower.start(texts)
    return follower, model


def distributions(rows: SlidingContext, texts) -> list[list[float]]:
    return rows.score(texts, [int(text is not None) for text in texts])[:, 0].exp().tolist()


def test_only_what_differs_is_read():
    rows, model = following([[1, 2, 3], [4]])
    (first, second), read = distributions(rows, [[1, 2, 4, 4], [4, 0]]), model.read
    assert first == pytest.approx(Q((1, 2, 4, 4))) and second == pytest.approx(Q((4, 0)))
    assert read == 3
    assert (
        distributions(rows, [None, [4, 0]])[1] == pytest.approx(Q((4, 0)))
        and model.read == read + 1
    )
    rows.prefill([[1, 2, 4, 4, 3], None])
    assert model.read == read + 2
    rows.prefill([None, None])


def test_what_follows_several_tokens_is_read_again():
    rows, model = following([[1, 2, 3]])
    logits = rows.score([[1, 2, 3]], [2])
    assert logits[0, 0].exp().tolist() == pytest.approx(Q((1, 2)))
    assert logits[0, 1].exp().tolist() == pytest.approx(Q((1, 2, 3)))
    assert model.read == 2 and rows.holds([1, 2, 3]) == 3


@pytest.mark.parametrize("context", [1, 2, 5, 8])
def test_of_a_long_text_the_end_is_read_and_moves_seldom(context):
    rows, model = following([[]], context=context)
    text = [int(x) for x in torch.randint(V, (40,), generator=torch.Generator().manual_seed(0))]
    lengths = []
    for n in range(1, len(text) + 1):
        (distribution,) = distributions(rows, [text[:n]])
        lengths.append(len(rows._cached[0]))
        assert distribution == pytest.approx(Q(tuple(text[n - lengths[-1] : n])))
    assert lengths[:context] == list(range(1, context + 1))
    assert min(lengths[context:], default=1) > context // 2 and max(lengths) == context
    whole, _ = following([text], context=context)
    assert whole._cached == rows._cached


OURS = Vocabulary({0: b"b", 1: b"a", 2: b" ab", 3: b" "}, eos_id=4)
THEIRS = Vocabulary({0: b"a", 1: b"ab", 2: b" ", 3: b"b", 5: b"c"}, eos_id=4)
SHARED = {0: 3, 1: 0, 3: 2, 4: 4}
DICTIONARY = VocabularyMap(OURS, THEIRS)
V2, DRAFT_V = 5, 7  # one id of the draft is padding
P, Q_WORDS = random_model(1, V2), random_model(2, DRAFT_V)


def translated(by_text: TextDrafting | None = None, distribution=Q_WORDS) -> TranslatedModel:
    return TranslatedModel(TableModel(distribution, DRAFT_V), DICTIONARY, V2, by_text)


def expected(told: tuple[int, ...]) -> list[float]:
    """The draft's distribution on the shared words, in the target's ids."""
    q = torch.zeros(V2, dtype=torch.float64)
    for ours, theirs in SHARED.items():
        q[ours] = float(Q_WORDS(told)[theirs])
    return (q / q.sum()).tolist()


def test_its_distribution_is_over_the_words_of_both_behind_the_text_in_the_drafts_ids():
    model = translated()
    model.start([[1], []])
    logits = model.score([[0, 2], [3]], [1, 1])
    assert logits.softmax(-1)[0, 0].tolist() == pytest.approx(expected((1, 2, 1)))
    assert logits.softmax(-1)[1, 0].tolist() == pytest.approx(expected((2,)))
    assert logits[0, 0, 2] == -torch.inf


def test_longer_tokens_than_the_last_one_are_ways_on():
    """Behind "a" the draft may have meant "ab", of which the target's next token is "b"."""
    model = translated()
    model.start([[]])
    distribution = model.score([[0, 1]], [1])[0, 0].softmax(-1)
    a, ab = float(Q_WORDS((3,))[0]), float(Q_WORDS((3,))[1])
    q = torch.zeros(V2, dtype=torch.float64)
    for ours, theirs in SHARED.items():
        q[ours] = a / (a + ab) * float(Q_WORDS((3, 0))[theirs])
    q[0] += ab / (a + ab)
    assert distribution.tolist() == pytest.approx((q / q.sum()).tolist())


def test_what_it_writes_is_likeliest_and_is_not_kept():
    def distribution(
        text,
    ):  # after "a" comes "b", after that " ", then an end; the padding is likeliest
        best = {(0,): 3, (0, 3): 2, (0, 3, 2): 4}.get(text, 2)
        return [0.5 if i == best else 0.6 if i == 6 else 0.01 for i in range(DRAFT_V)]

    model = translated(distribution=lambda text: distribution(text))
    model.start([[1], [1], [1]])
    written = model.draft_from_text([[], [], [3]], [5, 2, 0])
    assert written.draft_tokens == [[0, 3, 4], [0, 3], []] and written.num_forward_passes == 3
    assert model.draft_from_text([[], [], []], [1, 0, 0]).draft_tokens == [[0], [], []]


def test_what_it_writes_may_be_a_longer_token_than_the_texts_last():
    def distribution(text):  # "ab" behind "b"; behind that an end
        best = {(3,): 1, (3, 1): 4}.get(text, 2)
        return [0.5 if i == best else 0.01 for i in range(DRAFT_V)]

    model = translated(distribution=distribution)
    model.start([[0]])
    written = model.draft_from_text([[1]], [4])
    assert written.draft_tokens == [[0, 4]] and written.num_forward_passes == 2
    assert model.draft_from_text([[]], [1]).draft_tokens == [[0]]


def test_which_way_it_guesses():
    assert translated().drafts_from_text(greedy=True) and not translated().drafts_from_text(
        greedy=False
    )
    assert not translated(TextDrafting(greedy=False)).drafts_from_text(greedy=True)


def test_the_share_of_its_mass_on_words_of_both():
    model = translated()
    shares = model.measure_coverage([[1], [1, 0]])
    assert shares == pytest.approx(
        [sum(Q_WORDS(t)[i] for i in SHARED.values()) for t in ((0,), (1,))]
    )
    model.start([[1]])  # no rows are left


def test_its_memory_is_what_the_model_says():
    assert translated().capabilities.memory and translated().compute_cache_bytes([3], [0]) == 0
    assert translated().holds[0].vocab_size == DRAFT_V


def test_its_speed_is_known_where_that_of_its_model_is():
    assert stored_costs.make_identity(LMDrafter(translated())) is None
    own = TableModel(Q_WORDS, DRAFT_V)
    own.identity = "tiny"
    model = TranslatedModel(own, DICTIONARY, V2)
    assert "tiny" in str(stored_costs.make_identity(LMDrafter(model)))
    assert stored_costs.make_identity(LMDrafter(model)) != stored_costs.make_identity(
        LMDrafter(own)
    )


def test_a_text_that_parts_before_what_states_go_back_to_is_read_anew() -> None:
    network = hybrids.random("Lfm2ForCausalLM", 0)
    follower, text = SlidingContext(CausalModel(network)), [3 + 5 * i % 50 for i in range(120)]
    follower.start([text])
    other = [*text[:20], *range(5, 50)]
    logits = follower.score([other], [1])
    assert torch.allclose(logits[0, 0], pairs.scores(network, other)[-1], atol=1e-6)
