"""Tiny pairs on every runtime of a CPU, random requests, what each of them is alone, and what must
hold of the models whenever no step runs."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from transformers import PreTrainedModel

import hybrids
import pairs
from foretoken import Completion, SamplingParams, Speculator
from foretoken.controls.chain import build_chain
from foretoken.costing.costs import Costs
from foretoken.drafters.base import Drafter, iter_parts
from foretoken.drafters.cascade import CascadeDrafter
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.drafters.mixture import MixtureDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.engine import core, prefill_budget
from foretoken.inputs import resolve_verifier
from foretoken.lease import find_lease_record
from foretoken.models import draft_sequences
from foretoken.models.native.model import NativeModel, NativeTargetCopy
from foretoken.models.stock import packed
from foretoken.models.stock.model import CausalModel
from foretoken.sampling.distributions import probabilities
from foretoken.sampling.keys import SequenceKey, draw_exponentials
from oracle import random_model
from table import TableModel
from tiny import byte_level, llama

V = 320
SICK, DRAFT_SICK = 318, 317  # behind these the target's logits, or only the draft's, are NaN
DRAFTERS = ("lm", "lookup", "cascade", "mixture", "none")
CONTEXT = 256
HYBRID = "Qwen3_5ForCausalLM"


@dataclass(frozen=True)
class Runtime:
    """A target on it, drafters for it. `noise`: of its logits, where arithmetic depends on the
    batch; 0 where texts are promised. `own`: the drafts' passes run over the target's rows."""

    model: Callable[[str], Any]  # "target", "draft" or "middle"
    noise: Callable[[], float] = lambda: 0.0
    own: bool = False

    def speculator(self, drafter: str, before: str = "") -> Speculator:
        """Fresh models, with costs that nobody had to measure. `before`: their roles' names."""
        target = self.model(f"{before}target")
        pair = Speculator(target, self._drafter(drafter, before, target), byte_level())
        pair.costing.measured.update(
            {
                (kind, rows): Costs(((0, 0.0), (8, 0.8)), ((1, 1.0), (8, 1.3)), ((1, 0.1),))
                for kind in ("greedy", "sampled", "truncated")
                for rows in (1, 2, 4, 8, 16)
            }
        )
        return pair

    def _drafter(self, name: str, before: str, target: Any) -> Drafter:
        def model(role: str) -> Any:
            return over(target, f"{before}{role}") if self.own else self.model(f"{before}{role}")

        def cascade() -> CascadeDrafter:
            return CascadeDrafter(model("middle"), LMDrafter(self.model(f"{before}draft"), V), 2)

        return {
            "lm": lambda: LMDrafter(model("draft"), V),
            "lookup": LookupDrafter,
            "cascade": cascade,
            "mixture": lambda: MixtureDrafter(
                [(LookupDrafter(), 2), (LMDrafter(model("draft"), V), None)]
            ),
            "none": NoDrafter,
        }[name]()


SOUND = "sound "  # before a role: nothing makes its logits invalid


@cache
def network(role: str, family: str = "") -> PreTrainedModel:
    """In float64, of a family's class where that is named. What makes the target's logits invalid
    does so with the others', which read the same text."""
    kind = role.removeprefix(SOUND)
    noise = {"target": 0.0, "middle": 0.02, "draft": 0.04}[kind]
    plain = llama(V, CONTEXT, eos_token_id=None, head_dim=16).double()
    own = hybrids.random(family, 0, V) if family else plain
    target = pairs.relative(own, noise, seed=len(kind))
    if kind == role:
        with torch.no_grad():
            target.get_input_embeddings().weight[SICK] = torch.nan
            if role == "draft":
                target.get_input_embeddings().weight[DRAFT_SICK] = torch.nan
    return target.requires_grad_(False)


def table(role: str) -> TableModel:
    own, shared = random_model(len(role), V, 0.5, 0.05), random_model(0, V, 0.5, 0.05)

    def distribution(text: tuple[int, ...]) -> np.ndarray:
        if SICK in text or (DRAFT_SICK in text and role == "draft"):
            return np.full(V, np.nan)
        values = shared(text[-3:]) if role == "target" else (own(text) + 4 * shared(text[-3:])) / 5
        values = values.copy()
        values[[SICK, DRAFT_SICK]] = 0.0
        return values / values.sum()

    return TableModel(distribution, V, context=CONTEXT)


def packed_model(role: str) -> CausalModel:
    twin = copy.deepcopy(network(role)).float()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "MIN_PACKED_ELEMENTS", 1)
        assert packed.pack(twin).layers > 0
    return CausalModel(twin)


def graphs(role: str) -> Any:
    from foretoken.models.graphs import GraphModel

    return GraphModel(network(role))


def native(role: str, family: str = "") -> Any:
    from foretoken.models.native.conversion import NativeConversion

    source = copy.deepcopy(network(role, family)).float()
    return NativeConversion(None, "float32", lambda: source).load_model()


def over(target: Any, role: str) -> Any:
    """A draft's weights over the target's own rows."""
    from foretoken.models.native.conversion import NativeConversion

    family = HYBRID if getattr(target, "max_rewind", None) else ""
    source = partial(copy.deepcopy, network(role, family))
    return NativeConversion(None, "float32", lambda: source().float()).build_target_copy(target)


def measured(model: Callable[[str], Any], family: str = "") -> Callable[[], float]:
    """The largest difference of any logit from float64's, over some texts in blocks."""

    @cache
    def noise() -> float:
        text, worst = [(7 * i * i + 3 * i) % 300 + 1 for i in range(200)], 0.0
        expected = pairs.scores(network("target", family), text)
        for width in (1, 3, 8, 70):
            target = model("target")
            target.start([[]])
            for at in range(0, len(text), width):
                block = text[at : at + width]
                logits = target.score([block], [len(block)])[0].double()
                worst = max(worst, float((logits - expected[at : at + len(block)]).abs().max()))
        return worst

    return noise


LOOKS_UP = (
    "lookup",
    "mixture",
)  # drafters with a look-up, which in an engine copies earlier outputs

HYBRIDS = partial(native, family=HYBRID)
RUNTIMES = {
    "table": Runtime(table),
    "torch": Runtime(lambda role: CausalModel(network(role))),
    "hybrid": Runtime(lambda role: CausalModel(network(role, HYBRID))),
    "native hybrid": Runtime(HYBRIDS, measured(HYBRIDS, HYBRID)),
    "native hybrid self": Runtime(HYBRIDS, measured(HYBRIDS, HYBRID), own=True),
    "graphs": Runtime(graphs),
    "packed": Runtime(packed_model, measured(packed_model)),
    "native": Runtime(native, measured(native)),
    "native self": Runtime(native, measured(native), own=True),
}


@cache
def shared(runtime: str, drafter: str, number: int = 0, before: str = "") -> Speculator:
    """The same one for all who ask for that number."""
    return RUNTIMES[runtime].speculator(drafter, before)


@dataclass(frozen=True)
class Asked:
    """A request, as `Engine.add` takes it."""

    prompt: tuple[int, ...]
    params: SamplingParams
    gamma: int | None
    seed: int
    salt: str = ""
    prediction: tuple[int, ...] = ()  # beside its options: calls take none

    @property
    def options(self) -> dict[str, Any]:
        return {"params": self.params, "gamma": self.gamma, "seed": (self.seed, 1)}


LONG = tuple((5 * i * i + i) % 300 + 1 for i in range(110))
HEADS = ((), (40, 41, 42, 40, 41), LONG[:33], LONG[:70], LONG, (*LONG[:64], 9, 9, 9))
STRINGS = (" ", "e", "th", "a", "o", "\n")


@st.composite
def requests(draw: st.DrawFn, rule: str = "block", noisy: bool = False) -> Asked:
    """Any whose text is promised. `noisy`: and whose choices have margins, where numbers that are
    drawn once for a position decide."""
    temperature = draw(st.sampled_from([0.0, 0.0, 0.7, 1.0, 1.4]))
    temperature = 0.0 if noisy and rule != "coupled" else temperature
    gamma = draw(st.sampled_from([None, 0, 1, 2, 4]))
    follows = temperature == 0 or rule == "coupled"
    sick = draw(st.sampled_from([*[()] * 8, (SICK,), (DRAFT_SICK,)]))
    params = SamplingParams(
        temperature,
        draw(st.sampled_from([0, 0, 5, 40])),
        max_new_tokens=draw(st.integers(1, 12)),
        repetition_penalty=draw(st.sampled_from([None, None, 1.3])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.7])),
        no_repeat_ngram_size=draw(st.sampled_from([None, None, 2])),
        stop_strings=draw(st.none() | st.lists(st.sampled_from(STRINGS), min_size=1, max_size=3)),
        logprobs=draw(st.sampled_from([None, None, 2])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 1])),
        deterministic=gamma is None and not follows,
    )
    head, tail = draw(st.sampled_from(HEADS)), draw(st.lists(st.integers(1, 9), max_size=5))
    prompt = (*head, *tail, *sick, *draw(st.lists(st.integers(1, 300), min_size=1, max_size=3)))
    return Asked(prompt, params, gamma, draw(st.integers(0, 3)), draw(st.sampled_from("  ab")))


@dataclass
class Alone:
    """What requests are alone, in a Speculator of its own, found once."""

    runtime: str
    drafter: str
    rule: str
    known: dict[Asked, Completion] = field(default_factory=dict)

    def __call__(self, asked: Asked) -> Completion:
        if asked not in self.known:
            spec = shared(self.runtime, self.drafter, number=1)
            made = spec.inputs.make_requests(
                [list(asked.prompt)], [asked.params], [(asked.seed, 1)]
            )
            made = [replace(request, prediction=asked.prediction) for request in made]
            verifier = resolve_verifier(asked.gamma, self.rule, 1.0)
            (self.known[asked],) = spec.generate_completions(
                spec.inputs.make_sequences(made), verifier, asked.gamma
            )
        return self.known[asked]

    def require(self, asked: Asked, found: list[int], done: Completion | None) -> None:
        """A text, whole where it is done, is this one's or parts from it where rounding may."""
        own = self(asked)
        both = enumerate(zip(own.tokens, found, strict=False))
        place = next((i for i, (a, b) in both if a != b), min(len(own.tokens), len(found)))
        if place == len(found) and done is None:
            return
        if place < min(len(found), len(own.tokens)):
            self._require_near(asked, own.tokens, found, place)
            return
        fixed = asked.gamma is not None or asked.params.deterministic
        fixed = fixed and self.drafter not in LOOKS_UP  # in an engine at earlier outputs too
        noise = RUNTIMES[self.runtime].noise()
        errors = [str(one.error) for one in (done, own) if one is not None and one.error]
        if RUNTIMES[self.runtime].own and DRAFT_SICK in asked.prompt and errors:
            # where its invalid keys come to stand among the target's, the text goes on without the
            # draft; else the draft's logits end it. Nothing else may, but the target's own behind a
            # token that the text came to hold
            ends = ["draft", "target"] if SICK in (*own.tokens, *found) else ["draft"]
            known = [f"the {role}'s logits hold NaN" for role in ends]
            assert all(any(each in error for each in known) for error in errors), asked
            return
        if (noise or not fixed) and done is not None and len(errors) == 2:
            return  # how many tokens come before depends on what is guessed at once
        if not fixed and any("logits hold" in error for error in errors):
            # and so does whether any come: behind a draft token that is not kept they may, too, and
            # a draft that is not asked fails nothing
            return
        assert done is not None and place == len(found) == len(own.tokens), asked
        assert done.finish_reason == own.finish_reason and done.stop_reason == own.stop_reason
        assert done.text == own.text and (done.error is None) == (own.error is None)
        if fixed and not noise:
            assert [step.new_tokens for step in done.steps] == [
                step.new_tokens for step in own.steps
            ]
            assert [step.draft_tokens for step in done.steps] == [
                step.draft_tokens for step in own.steps
            ]

    def require_failing(self, asked: Asked, error: Exception) -> None:
        """A text that fails does so alone too, or its draft's logits end it where this may be."""
        own = RUNTIMES[self.runtime].own and DRAFT_SICK in asked.prompt  # as `require` says
        if not own or "the draft's logits hold NaN" not in str(error):
            assert self(asked).error is not None, asked

    def _require_near(self, asked: Asked, own: list[int], found: list[int], place: int) -> None:
        """The two tokens at the first difference are within noise of one another."""
        noise = RUNTIMES[self.runtime].noise()
        assert noise > 0, f"{asked}: {found} is {own} alone"
        spec = shared(self.runtime, self.drafter, number=1)
        (request,) = spec.inputs.make_requests(
            [list(asked.prompt)], [asked.params], [(asked.seed, 1)]
        )
        logits = pairs.scores(network("target"), [*asked.prompt, *own[:place]])[-1]
        if (controls := build_chain(request, V)) is not None:
            logits = controls.shape(logits, list(own[:place]))
        edge = asked.params.top_k and logits.sort(descending=True).values[: asked.params.top_k + 1]
        cut = float(edge[-2] - edge[-1]) if asked.params.top_k else np.inf
        if not asked.params.greedy:
            assert self.rule == "coupled"
            p = probabilities(logits[None], asked.params)[0]
            position = len(asked.prompt) + place
            drawn = draw_exponentials(SequenceKey(asked.seed, 1), position, V)
            logits = (p.log() - torch.from_numpy(drawn).log()) * asked.params.temperature
        gap = abs(float(logits[own[place]] - logits[found[place]]))
        assert min(gap, cut) <= 4 * noise, f"{asked}: {found} is {own} alone, {gap} apart"


def steady_times(patch: pytest.MonkeyPatch) -> None:
    """Prompts of a few tokens are long, for target and draft, and a clock that ticks evenly: how
    much of them is read beside others is the same in every run."""
    ticks = count()
    patch.setattr(core, "perf_counter", lambda: float(next(ticks)))
    patch.setattr(prefill_budget, "MIN_CHUNK_TOKENS", 4)
    patch.setattr(prefill_budget, "MAX_CHUNK_TOKENS", 24)
    patch.setattr(draft_sequences, "CATCH_UP_TOKENS", 8)


def parts(spec: Speculator) -> list[Any]:
    return [*iter_parts(spec.target), *iter_parts(spec.drafter)]


def rows_of(part: Any) -> int:
    """How many rows a model or drafter holds."""
    if isinstance(part, TableModel):
        return len(part._texts)
    if isinstance(part, NativeTargetCopy):
        return len(part._own_lengths)
    if hasattr(part, "_sequences"):
        return len(part._sequences.token_ids)
    part = part.cache if hasattr(part, "eager") else part  # graphs
    return len(getattr(part, "lengths", ()))


def require_accounted(spec: Speculator) -> None:
    """Between steps: the batch's rows are in the target, those that the drafter has joined with are
    in every part of it that runs, and every page is held by as many rows as it says, or free."""
    batch = spec.core.batch
    assert [task.seq for task in spec.core.scheduler.running] == batch.seqs
    assert rows_of(spec.target) == len(batch.seqs)
    drafted = 0 if batch._lease is None else batch._lease.num_drafted
    for part in parts(spec):
        rows = len(batch.seqs) if part in iter_parts(spec.target) else drafted
        assert rows_of(part) in (0, rows)
        if isinstance(part, NativeModel):
            every = [*part.seqs, *(part.pool.prefix_cache or ())]
            users = Counter(id(page) for row in every for page in row.pages)
            found = {id(page): page.num_users for row in every for page in row.pages}
            assert part.pool.num_used == len(found) and found == users
        elif hasattr(part, "pages"):
            holders = Counter(page for pages in part.pages for page in pages)
            assert part.pool.holders == [holders[page] for page in range(part.pool.size)]
            assert sorted([*part.pool.free, *holders]) == list(range(part.pool.size))


def require_empty(spec: Speculator) -> None:
    """Nothing is left: no rows, no leases, and every page is free."""
    require_accounted(spec)
    assert spec.core.is_unused and not spec.core.batch.seqs
    for part in parts(spec):
        assert rows_of(part) == 0 and find_lease_record(part) is None
        if hasattr(part, "pages"):
            assert sorted(part.pool.free) == list(range(part.pool.size))
            assert not any(part.pool.holders)
