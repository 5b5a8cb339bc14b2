"""A row's controls shape its distribution at every position by what stands before it, guesses
included: two steps leave that distribution as it is, whatever drafts and whichever rule verifies.

The distribution that the controls make of the target is written here a second time, in NumPy, from
the whole text at every position. Dead ends count: a text behind which the controls leave nothing
ends there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from exact.drafters import Certain, FunctionDrafter
from exact.worlds import Case, Table, WorldDraw, bias, distribution_of
from foretoken.drafters.cascade import CascadeDrafter
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.drafters.mixture import MixtureDrafter
from foretoken.drafters.uniform import UniformDrafter
from foretoken.request import Request
from foretoken.sampling.acceptance_rules import EXACT_RULES
from foretoken.sampling.distributions import SamplingParams, compute_row_probabilities
from foretoken.sampling.keys import SequenceKey
from oracle import Model, Text, random_model, softmax

pytestmark = pytest.mark.daily

V, GAMMA = 3, 2
KEY = SequenceKey(0, 0)
VISIBLE = 1e-3
P = random_model(9, V, zeros=0.15)  # ends late, with many texts that are likely
ENDS = frozenset({1})
PROMPT = [0, 0]  # lookup guesses 0; a text with 2 in it is another to penalties

# state -> the state behind each token that is possible there
AUTOMATON: list[dict[int, int]] = [{0: 1, 2: 0}, {1: 0, 2: 2}, {0: 0, 2: 1}]


class Automaton:
    """A grammar of three states, followed token by token; behind what it forbids all is
    forbidden."""

    def __init__(self) -> None:
        self.states: list[int | None] = [0]

    def push(self, token: int) -> None:
        here = self.states[-1]
        self.states.append(None if here is None else AUTOMATON[here].get(token))

    def pop(self) -> None:
        self.states.pop()

    def __call__(self, scores: Tensor) -> Tensor:
        here = self.states[-1]
        possible = {} if here is None else AUTOMATON[here]
        for token in set(range(len(scores))) - possible.keys():
            scores[token] = -torch.inf
        return scores

    def find_forced_tokens(self) -> list[int]:
        return []


def masked(scores: np.ndarray, new: Text) -> None:
    """What the automaton leaves of scores behind new tokens: nothing behind a forbidden one."""
    state, possible = 0, AUTOMATON[0]
    for token in new:
        state = possible.get(token)
        possible = {} if state is None else AUTOMATON[state]
    scores[[token for token in range(len(scores)) if token not in possible]] = -np.inf


def controlled(
    model: Model,
    params: SamplingParams,
    prompt: int,
    *,
    source: int = 0,
    eos: frozenset[int] = frozenset(),
    automaton: bool = False,
) -> Model:
    """The distribution that controls make of a model's: of texts of which the first `source` tokens
    are the encoder's and `prompt` more are given."""

    def distribution(everything: Text) -> np.ndarray:
        read, text = everything[:source] or everything[:prompt], everything[source:]
        new = text[prompt:]
        with np.errstate(divide="ignore"):
            s = np.log(model(everything))
        for biases in params.sequence_bias or (), params.logit_bias:
            for ids, number in biases:
                s[ids[-1]] += number * ends_with(text, ids[:-1])
        multiply(s, set(read), 1 / (params.encoder_repetition_penalty or 1))
        multiply(s, set(text), params.repetition_penalty or 1)
        for token in set(new):
            s[token] -= params.presence_penalty + params.frequency_penalty * new.count(token)
        for past, n in (
            (text, params.no_repeat_ngram_size),
            (read, params.encoder_no_repeat_ngram_size),
        ):
            for i in range(len(past) - n + 1 if n else 0):
                if ends_with(text, past[i : i + n - 1]):
                    s[past[i + n - 1]] = -np.inf
        for ids in params.bad_words_ids or ():
            if ends_with(text, ids[:-1]) and not (len(ids) == 1 and ids[0] in eos):
                s[ids[-1]] = -np.inf
        if len(new) < (params.min_new_tokens or 0):
            s[list(eos)] = -np.inf
        if params.exponential_decay_length_penalty is not None:
            start, factor = params.exponential_decay_length_penalty
            for token in eos:
                if len(new) > start and np.isfinite(s[token]):
                    s[token] += abs(s[token]) * (factor ** (len(new) - start) - 1)
        s[list(params.suppress_tokens or ())] = -np.inf
        if not new:
            s[list(params.begin_suppress_tokens or ())] = -np.inf
        if params.allowed_token_ids is not None:
            s[[token for token in range(V) if token not in params.allowed_token_ids]] = -np.inf
        if automaton:
            masked(s, new)
        if params.thinking_budget is not None:
            closed_thoughts(s, new, *params.thinking_budget)
        return softmax(s) if np.isfinite(s.max()) else np.zeros(len(s))

    return distribution


def closed_thoughts(s: np.ndarray, new: Text, most: int, opening: Text, closing: Text) -> None:
    """Leave one token behind `most` of thoughts that are open: the next of those that close them,
    where it is possible."""
    places = range(len(opening), len(new) + 1)
    begun = next((i for i in places if ends_with(new[:i], opening)), None)
    if begun is None or len(new) - begun < most:
        return
    if any(ends_with(new[:i], closing) for i in range(begun + len(closing), len(new) + 1)):
        return
    there = max(k for k in range(len(closing)) if ends_with(new, closing[:k]))
    if np.isfinite(s[closing[there]]):
        s[[token for token in range(len(s)) if token != closing[there]]] = -np.inf


def ends_with(text: Text, ids: Text) -> bool:
    return len(ids) <= len(text) and text[len(text) - len(ids) :] == tuple(ids)


def multiply(scores: np.ndarray, ids: set[int], penalty: float) -> None:
    for token in ids:
        scores[token] *= penalty if scores[token] < 0 else 1 / penalty


def sampled(temperature: float = 1.0, **controls) -> SamplingParams:
    return SamplingParams(temperature, **controls)


CONTROLS = {
    "penalty": sampled(repetition_penalty=1.7),
    "reward": sampled(repetition_penalty=0.6),
    "prompt-penalty": sampled(encoder_repetition_penalty=1.8),
    "occurrence": sampled(presence_penalty=0.4, frequency_penalty=0.9),
    "ngrams": sampled(no_repeat_ngram_size=2),
    "prompt-ngrams": sampled(encoder_no_repeat_ngram_size=2),
    "least": sampled(min_new_tokens=3),
    "bad-words": sampled(bad_words_ids=[[2, 2], [0, 1], [1, 0, 1]]),
    "bias": sampled(sequence_bias={(0, 1): 1.5, (2,): -0.7}, logit_bias={0: -0.3}),
    "decay": sampled(exponential_decay_length_penalty=(1, 0.6)),
    "suppress": sampled(suppress_tokens=[2], begin_suppress_tokens=[0]),
    "allowed": sampled(allowed_token_ids=[0, 1]),
    "thoughts": sampled(thinking_budget=(1, [0], [2, 0])),
    "thoughts-begun": sampled(thinking_budget=(2, [], [2, 2])),
    "all": sampled(
        0.8,
        top_p=0.95,
        repetition_penalty=1.3,
        no_repeat_ngram_size=3,
        bad_words_ids=[[2, 2]],
        min_new_tokens=2,
        frequency_penalty=0.5,
    ),
}
PLAIN = sampled()


def table(seed: int) -> Table:
    return Table(random_model(seed, V, zeros=0.15), V)


def lm(seed: int = 2) -> LMDrafter:
    return LMDrafter(table(seed), V)


DRAFTERS: dict[str, Callable] = {
    "lm": lm,
    "lm-of-its-own-law": lambda: LMDrafter(table(2), V, sampled(0.5)),
    "lookup": lambda: LookupDrafter(),
    "uniform": lambda: UniformDrafter(V),
    "free": lambda: FunctionDrafter(random_model(2, V, zeros=0.15)),  # knows nothing of controls
    "cascade": lambda: CascadeDrafter(table(3), lm(), 1),
    "cascade-of-lookup": lambda: CascadeDrafter(table(3), LookupDrafter(), 2),
    "lookup-then-lm": lambda: MixtureDrafter([(LookupDrafter(), 1), (lm(), None)]),
    "lm-then-uniform": lambda: MixtureDrafter([(lm(), 1), (UniformDrafter(V), None)]),
    "lm-then-cascade": lambda: MixtureDrafter(
        [(lm(), 1), (CascadeDrafter(table(3), lm(4), 1), None)]
    ),
}


def case(kind: str | Callable, rule: str, params: SamplingParams = PLAIN, **changes) -> Case:
    rows = (Request(PROMPT, 100, KEY, ENDS),)
    drafter = DRAFTERS[kind] if isinstance(kind, str) else kind
    changes = {"rows": rows} | changes
    return Case(lambda: Table(P, V), drafter, EXACT_RULES[rule], GAMMA, params, **changes)


def off(found: Case, monkeypatch, *, automaton: bool = False) -> float:
    """Total variation from the distribution that this file makes of the target's."""
    (row,) = found.rows
    assert found.params is not None
    source_length = len(row.source or ())
    own = controlled(
        P, found.params, len(row.prompt), source=source_length, eos=row.eos, automaton=automaton
    )
    return bias(found, own, monkeypatch)


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("name", CONTROLS)
def test_every_control(name, rule, monkeypatch):
    assert off(case("lm", rule, CONTROLS[name]), monkeypatch) < 1e-12


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_every_drafter(kind, rule, monkeypatch):
    """Penalties and bans at once."""
    assert off(case(kind, rule, CONTROLS["all"]), monkeypatch) < 1e-12


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_mask_automaton(kind, rule, monkeypatch):
    setting = case(kind, rule, matcher=Automaton)
    assert off(setting, monkeypatch, automaton=True) < 1e-12


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("kind", ["lm", "lookup", "cascade"])
@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_other_temperatures(temperature, kind, rule, monkeypatch):
    """At temperature 0 there is one text, and it ends where the controls leave nothing."""
    params = sampled(temperature, repetition_penalty=1.4, no_repeat_ngram_size=2)
    assert off(case(kind, rule, params), monkeypatch) < 1e-12


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("kind", ["lm", "lookup", "lookup-then-lm"])
def test_an_encoder_decoder(kind, rule, monkeypatch):
    """Controls named after the encoder look at the source, the others at the decoder's text."""
    params = sampled(
        encoder_repetition_penalty=1.5, encoder_no_repeat_ngram_size=2, no_repeat_ngram_size=2
    )
    setting = Case(
        lambda: Table(P, V, encoder_decoder=True),
        {
            "lm": lambda: LMDrafter(Table(random_model(2, V), V, encoder_decoder=True), V),
            "lookup": DRAFTERS["lookup"],
            "lookup-then-lm": DRAFTERS["lookup-then-lm"],  # the model in it has no encoder
        }[kind],
        EXACT_RULES[rule],
        GAMMA,
        params,
        rows=(Request([0], 100, KEY, ENDS, source=[2, 1, 1]),),
    )
    assert off(setting, monkeypatch) < 1e-12


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("kind", ["lookup", "always", "lookup-then-lm"])
def test_a_draft_token_that_the_controls_forbid(kind, rule, monkeypatch):
    """It is never kept, whatever stands behind it, and the token in its place has its own
    distribution."""
    row = Request([0, 2, 0, 2, 0], 100, KEY, ENDS)  # lookup guesses 2
    always = lambda: Certain(lambda text: np.eye(V)[2])  # noqa: E731
    for changes in (
        {"params": sampled(suppress_tokens=[2])},
        {"params": sampled(bad_words_ids=[[0, 2]])},
        {"params": sampled(no_repeat_ngram_size=2)},
        {"matcher": Automaton},
    ):
        setting = case(always if kind == "always" else kind, rule, rows=(row,), **changes)
        assert off(setting, monkeypatch, automaton="matcher" in changes) < 1e-12
        if "matcher" not in changes:
            assert all(text[:1] != (2,) for (text,) in distribution_of(setting, monkeypatch))


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("certain", [True, False])
def test_an_end_that_is_guessed_inside_the_block(certain, rule, monkeypatch):
    """As long as ends are suppressed it is not kept; later it ends the text, and what the controls
    made of the draft tokens behind it is forgotten."""
    end = lambda text: np.array([0.1, 0.8, 0.1])  # noqa: E731
    drafter = (lambda: Certain(end)) if certain else (lambda: FunctionDrafter(end))
    params = sampled(min_new_tokens=1, repetition_penalty=1.5, no_repeat_ngram_size=2)
    setting = case(drafter, rule, params)
    assert off(setting, monkeypatch) < 1e-12
    texts = {text for (text,) in distribution_of(setting, monkeypatch)}
    assert all(1 not in text[:-1] and text != (1,) for text in texts)
    assert any(len(text) == 2 and text[-1] == 1 for text in texts)


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("kind", ["lm", "cascade", "free"])
def test_a_dead_end_behind_draft_tokens(kind, rule, monkeypatch):
    """No text goes past it, though a draft that knows of no controls guesses beyond, and beyond it
    there are possible tokens again."""
    row = Request([0, 2, 0, 1], 100, KEY)  # a second 0 is followed by 0, a third by nothing
    setting = case(kind, rule, sampled(no_repeat_ngram_size=2), rows=(row,))
    assert off(setting, monkeypatch) < 1e-12
    texts = {text for (text,) in distribution_of(setting, monkeypatch)}
    assert (0, 0) in texts and any(len(text) > 3 for text in texts)


@pytest.mark.parametrize("rule", EXACT_RULES)
def test_rows_with_controls_of_their_own(rule, monkeypatch):
    """Three rows of one batch, one of them greedy: each is what it is alone, and their joint
    distribution the product."""
    rows = (
        Request([0], 100, KEY, params=sampled(0.7, repetition_penalty=1.6)),
        Request([1, 0], 100, KEY, params=sampled(0.0, no_repeat_ngram_size=1)),
        Request([1, 0, 1], 100, KEY, params=sampled(1.4, logit_bias={0: 0.8}, min_p=0.1)),
        Request([0, 0], 100, KEY),
    )
    p = random_model(1, 2, zeros=0.15)

    def distribution(*rows: Request) -> dict[tuple[Text, ...], float]:
        drafter = lambda: LMDrafter(Table(random_model(2, 2), 2), 2)  # noqa: E731
        target = lambda: Table(p, 2)  # noqa: E731
        return distribution_of(
            Case(target, drafter, EXACT_RULES[rule], 1, None, rows, 1, together=False), monkeypatch
        )

    together, alone = distribution(*rows), [distribution(row) for row in rows]
    for texts in itertools.product(*alone):
        own = np.prod([one[text] for one, text in zip(alone, texts, strict=True)])
        assert together.pop(tuple(text for (text,) in texts), 0.0) == pytest.approx(own, abs=1e-12)
    assert not together
    for row in rows:  # and alone each has the distribution of its controls
        own = controlled(p, row.params, len(row.prompt))
        setting = Case(
            lambda: Table(p, 2), lambda: UniformDrafter(2), EXACT_RULES[rule], 1, None, (row,), 2
        )
        assert bias(setting, own, monkeypatch) < 1e-12


class AtTheStart:
    """Every position of a block is shaped as its first."""

    def __init__(self, chain) -> None:
        self.chain, self.V = chain, chain.V

    def shape(self, logits: Tensor, ahead: list[int]) -> Tensor:
        return self.chain.shape(logits, ahead[:0])

    def find_forced_tokens(self, ahead: list[int]) -> list[int]:
        return self.chain.find_forced_tokens(ahead)

    def commit(self, tokens: list[int]) -> None:
        self.chain.commit(tokens)


class OneLate(AtTheStart):
    """Every position is shaped without the draft token right before it."""

    def shape(self, logits: Tensor, ahead: list[int]) -> Tensor:
        return self.chain.shape(logits, ahead[:-1])


class NeverTakesBack(AtTheStart):
    """A guess that was not kept stays in the text that the controls look at."""

    def __init__(self, chain) -> None:
        super().__init__(chain)
        self.most: list[int] = []

    def shape(self, logits: Tensor, ahead: list[int]) -> Tensor:
        self.most = max(self.most, ahead, key=len)
        return self.chain.shape(logits, ahead)

    def commit(self, tokens: list[int]) -> None:
        self.chain.commit([*tokens, *self.most[len(tokens) :]])
        self.most = []


class BeforeShaping(WorldDraw):
    """Says that draft tokens were drawn from the distribution that the draft had before its
    controls."""

    def sample(self, logits, i, params=None):
        ids, _ = super().sample(logits, i, params)
        return ids, compute_row_probabilities(logits, self.params)


class WithoutShaping(WorldDraw):
    """Draws from the distribution before controls, and says that it was the one after."""

    def sample(self, logits, i, params=None):
        q = compute_row_probabilities(self._apply_controls(logits, i), self.params)
        return self(compute_row_probabilities(logits, self.params), i), q


PENALTY = sampled(repetition_penalty=1.7)
LIES = {
    "penalty-of-the-start": {"params": PENALTY, "controls": AtTheStart},
    "mask-of-the-start": {"matcher": Automaton, "controls": AtTheStart},
    "penalty-one-late": {"params": PENALTY, "controls": OneLate},
    "mask-one-late": {"matcher": Automaton, "controls": OneLate},
    "never-takes-back": {"params": sampled(no_repeat_ngram_size=2), "controls": NeverTakesBack},
    "q-before-shaping": {"params": PENALTY, "draw": BeforeShaping},
    "q-before-the-mask": {"matcher": Automaton, "draw": BeforeShaping},
    "q-that-was-not-drawn-from": {"params": PENALTY, "draw": WithoutShaping},
}


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("lie", LIES)
def test_mistakes_are_seen(lie, rule, monkeypatch):
    """Each of them without its last entry is a case above, and passes."""
    setting = case("lm", rule, **LIES[lie])
    assert off(setting, monkeypatch, automaton="matcher" in LIES[lie]) > VISIBLE


@pytest.mark.prove
@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("name", CONTROLS)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_proof_every_control_and_drafter(kind, name, rule, monkeypatch):
    assert off(case(kind, rule, CONTROLS[name]), monkeypatch) < 1e-12


@pytest.mark.prove
@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("name", ["penalty", "ngrams", "all", "mask"])
@pytest.mark.parametrize("kind", ["lm", "free", "lookup-then-lm"])
@pytest.mark.parametrize(("gamma", "steps"), [(3, 2), (1, 4)])
def test_proof_larger(gamma, steps, kind, name, rule, monkeypatch):
    changes = {"matcher": Automaton} if name == "mask" else {"params": CONTROLS[name]}
    setting = replace(case(kind, rule, **changes), gamma=gamma, steps=steps)
    assert off(setting, monkeypatch, automaton=name == "mask") < 1e-12
