"""What every drafter must do: in any company it drafts for a sequence what it drafts for it alone,
each draft token comes with the distribution that it was drawn from, and no greedy text depends on
it.

A drafter is an entry of `PAIRS`, with a target. How each makes its draft tokens, others test.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

import assistants
import blocks
import tiny
from foretoken.certificate.watched_drafter import WatchedDrafter
from foretoken.drafters.base import Draft, Drafter, Draw, pack, require_drafter
from foretoken.drafters.cascade import CascadeDrafter
from foretoken.drafters.choice import DrafterChoice
from foretoken.drafters.copying import CopyDrafter
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.drafters.mixture import MixtureDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.drafters.uniform import UniformDrafter
from foretoken.engine.batch import Batch
from foretoken.errors import RefusedError
from foretoken.models.base import Model
from foretoken.models.native.conversion import NativeConversion
from foretoken.models.vocabularies.translated import TextDrafting, TranslatedModel
from foretoken.models.vocabularies.vocabulary import Vocabulary, VocabularyMap
from foretoken.request import Request, SequenceState
from foretoken.sampling.acceptance_rules import speculative
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.keys import SequenceKey
from foretoken.sampling.verifier import make_verifier
from oracle import random_model
from pairdrafts import eagle_file, mtp_draft, mtp_stack, on_native, pairs_drafter
from table import TableModel

pytestmark = pytest.mark.cpu_only
V, GAMMA = 12, 3
P, Q, R = (random_model(seed, V) for seed in range(3))
WORDS = Vocabulary({id: bytes([97 + id]) for id in range(10)}, eos_id=10)
PROMPTS = [[5, 7], [3, 9, 1, 1, 8, 2, 4, 10, 3, 9], [6, 2, 2, 11]]
LIMITS = [20, 7, 13]
Pair = tuple[Model, Drafter]


def table(distribution: Any, **options: Any) -> TableModel:
    return TableModel(distribution, V, **options)


def over_a_table(make: Callable[[], Drafter]) -> Callable[[], Pair]:
    return lambda: (table(P), make())


def translated(by_text: TextDrafting) -> TranslatedModel:
    return TranslatedModel(table(Q), VocabularyMap(WORDS, WORDS), V, by_text)


@cache
def network() -> Any:
    return tiny.llama(V, num_hidden_layers=4, head_dim=16)


def of_pairs(make: Callable[..., Any], precision: str) -> Callable[[], Pair]:
    def made() -> Pair:
        target = getattr(copy.deepcopy(network()), precision)()
        drafter = make(target, eagle_file(V, (1, 2, 3)).read(target))
        return drafter.target, drafter

    return made


def of_layers(make: Callable[..., Any], count: int) -> Callable[[], Pair]:
    def made() -> Pair:
        target = copy.deepcopy(network()).float()
        drafter = make(target, mtp_draft(target, mtp_stack(target, count)[1]))
        return drafter.target, drafter

    return made


def copied_over_rows() -> Pair:
    target: Any = NativeConversion(None, "float32", lambda: copy.deepcopy(network())).load_model()
    conversion = NativeConversion(None, "int4", lambda: copy.deepcopy(network()))
    return target, LMDrafter(conversion.build_target_copy(target))


def assisted() -> Pair:
    target = assistants.running(assistants.target(V))
    return target, assistants.drafter(target, assistants.network(V))


def natively_assisted() -> Pair:
    return assistants.on_native(assistants.target(V, inputs=16), assistants.network(V))


class FourMethods:
    """An object of a user's, which repeats the last token."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def start(self, rows: Any, prompts: Any, sources: Any) -> None:
        self.texts += [list(prompt) for prompt in prompts]

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        return pack([text[-1:] * g for text, g in zip(self.texts, gamma, strict=True)])

    def commit(self, tokens: list[list[int]]) -> None:
        for text, new in zip(self.texts, tokens, strict=True):
            text += new

    def leave(self, rows: list[int]) -> None:
        self.texts = [text for b, text in enumerate(self.texts) if b not in rows]


class Switching(DrafterChoice):
    """Chooses, by a sequence's length, between two models."""

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        self.chosen = [length // 3 % 2 for length in draw.lengths]
        return super().propose(gamma, draw)


def choosing_pairs() -> Pair:
    target, drafter = of_pairs(pairs_drafter, "double")()
    return target, Switching([drafter, LMDrafter(table(Q))])


PAIRS: dict[str, Callable[[], Pair]] = {
    "none": over_a_table(NoDrafter),
    "uniform": over_a_table(lambda: UniformDrafter(V)),
    "lookup": over_a_table(LookupDrafter),
    "copy": over_a_table(CopyDrafter),
    "four methods": over_a_table(lambda: require_drafter(FourMethods())),
    "watched": over_a_table(lambda: WatchedDrafter(LMDrafter(table(Q)), 0)),
    "model": over_a_table(lambda: LMDrafter(table(Q))),
    "model at a temperature": over_a_table(
        lambda: LMDrafter(table(Q), params=SamplingParams(0.7, top_k=4))
    ),
    "model of a short context": over_a_table(lambda: LMDrafter(table(Q, context=9))),
    "model of fewer ids": over_a_table(lambda: LMDrafter(TableModel(random_model(4, 9), 9), V)),
    "model of another vocabulary": over_a_table(
        lambda: LMDrafter(translated(TextDrafting(greedy=False)))
    ),
    "model of another vocabulary by its text": over_a_table(
        lambda: LMDrafter(translated(TextDrafting(greedy=True, sampled=True)))
    ),
    "copy of the target over its rows": copied_over_rows,
    "cascade": over_a_table(lambda: CascadeDrafter(table(Q), LMDrafter(table(R)), 2)),
    "mixture": over_a_table(
        lambda: MixtureDrafter([(LookupDrafter(), 1), (LMDrafter(table(Q)), None)])
    ),
    "choice": over_a_table(lambda: Switching([LMDrafter(table(Q)), LMDrafter(table(R))])),
    "choice of pairs": choosing_pairs,
    "pairs": of_pairs(pairs_drafter, "double"),
    "native pairs": of_pairs(on_native, "float"),
    "layer": of_layers(pairs_drafter, 1),
    "native layer": of_layers(on_native, 1),
    "stack": of_layers(pairs_drafter, 2),
    "native stack": of_layers(on_native, 2),
    "blocks": lambda: blocks.pair(blocks.ZLAB, copy.deepcopy(network()).double()),
    "chained blocks": lambda: blocks.pair(blocks.CONFIDENT, copy.deepcopy(network()).double()),
    "native blocks": lambda: blocks.native_pair(blocks.DFLASH2, network()),
    "native chained blocks": lambda: blocks.native_pair(blocks.CONFIDENT, network()),
    "assistant": assisted,
    "native assistant": natively_assisted,
}
BACK = {"none", "uniform", "lookup", "copy", "cascade", "mixture"}
BACK |= {name for name in PAIRS if name.startswith(("model", "copy of"))}


@pytest.fixture(params=PAIRS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@cache
def made(name: str) -> Pair:
    return PAIRS[name]()


def well_formed(draft: Draft, gamma: list[int], draw: Draw) -> Draft:
    """Within what was asked for, of ids that there are, each possible under its q."""
    lengths = draft.lengths.tolist()
    assert len(lengths) == len(gamma)
    assert all(0 <= n <= g for n, g in zip(lengths, gamma, strict=True))
    assert draft.tokens.shape == (len(gamma), draft.tokens.shape[1])
    assert draft.calls >= 0
    for b, n in enumerate(lengths):
        tokens = draft.tokens[b, :n].long()
        assert ((tokens >= 0) & (tokens < V)).all()
        if draft.q is not None and n:
            q = draft.q[b, :n].double()
            assert q.shape == (n, V) and torch.allclose(q.sum(-1), torch.ones(n).double())
            assert (q.gather(1, tokens[:, None]) > 0).all()
        if draft.tops is not None:
            assert draft.tops[b, :n].isfinite().all()
    return draft


def run(pair: Pair, rows: list[SequenceState], gamma: int = GAMMA) -> None:
    """Another row alone for two steps, then these join one by one, until each has its end."""
    target, drafter = pair
    own, batch, verifier = drafter.propose, Batch(target, drafter), make_verifier(speculative)
    other = SequenceState.from_request(
        Request([1, 7, 2], 60, SequenceKey(9, 9), params=rows[0].request.params)
    )
    waiting = [[], [], *([row] for row in rows)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "propose", lambda g, draw: well_formed(own([*g], draw), g, draw))
        try:
            batch.join([other], drafts=gamma > 0)
            while waiting or any(row.finish_reason is None for row in rows):
                if waiting and (joining := waiting.pop(0)):
                    batch.join(joining)
                batch.step(verifier, [gamma] * len(batch.seqs))
        finally:
            batch.clear()


def fresh(temperature: float, *chosen: int) -> list[SequenceState]:
    params = SamplingParams(temperature)
    places = chosen or range(len(PROMPTS))
    return [
        SequenceState.from_request(Request(PROMPTS[i], LIMITS[i], SequenceKey(4, i), params=params))
        for i in places
    ]


def course(row: SequenceState) -> list[tuple[Any, ...]]:
    return [(step.draft_tokens, step.accepted, step.new_tokens) for step in row.records]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_rows_are_drafted_for_as_if_alone(name: str, temperature: float) -> None:
    """While others join and leave."""
    together = fresh(temperature)
    run(made(name), together)
    drafted = sum(len(step.draft_tokens) for row in together for step in row.records)
    assert (drafted > 0) == (name != "none") or name in ("lookup", "copy")
    for i, row in enumerate(together):
        (alone,) = rows = fresh(temperature, i)
        run(made(name), rows)
        assert row.finish_reason == "length" and course(row) == course(alone)


def test_no_greedy_text_depends_on_draft_tokens(name: str) -> None:
    drafted, plain = fresh(0.0), fresh(0.0)
    run(made(name), drafted)
    run(made(name), plain, gamma=0)
    assert [row.new_tokens for row in drafted] == [row.new_tokens for row in plain]


def test_rows_of_a_run_that_was_broken_off_are_gone(name: str) -> None:
    target, drafter = made(name)
    batch = Batch(target, drafter)
    batch.join(fresh(1.0))
    batch.step(make_verifier(speculative), [GAMMA] * 3)
    batch.clear()
    rows, others = fresh(1.0), fresh(1.0)
    run(made(name), rows)
    run(PAIRS[name](), others)
    assert [course(row) for row in rows] == [course(row) for row in others]


def test_what_a_drafter_says_of_itself(name: str) -> None:
    target, drafter = made(name)
    assert drafter.vocab_size in (None, target.vocab_size) and isinstance(drafter.runtime, str)
    assert drafter.rewinds == (name in BACK)
    if not drafter.rewinds:
        with pytest.raises(RefusedError, match="cannot rewind"):
            drafter.rewind([1])
    if isinstance(drafter, DrafterChoice):
        assert drafter.with_target(target).holds != drafter.holds or name == "choice"
    elif not drafter.reads_target:
        assert drafter.with_target(target) is drafter
    else:
        assert drafter.target is target and drafter.reads_states
        assert type(drafter.with_target(target)) is type(drafter)
    assert not drafter.priors or all(len(prior) == 2 for prior in drafter.priors)
