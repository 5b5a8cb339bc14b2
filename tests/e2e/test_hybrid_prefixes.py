"""Models with recurrent states in an engine with a prefix cache and rejected draft tokens: each
output is the output of the same request alone, without prefix cache and without draft tokens.

The requests share prefixes of several lengths, continue earlier outputs, arrive while others run,
end at rejected draft tokens, are aborted and are preempted. Sampled requests use rule="coupled",
whose tokens do not depend on draft tokens. On the native decoder, the outputs are the same to the
bit. On torch, models are in float64, except for the families of `FLOAT32`. There a near-tie could
make an output differ: two tokens that are within float32's rounding, with a chance below 1e-5 for
each of about 500 tokens.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any

import pytest
import transformers
from transformers import DynamicCache, PreTrainedModel

import hybrids
import pairs
from census import classes
from families import RESULT
from foretoken import Engine, Speculator, load
from foretoken.drafters.base import Draft, Drafter, pack
from foretoken.models.native.model import NativeModel
from foretoken.models.native.recurrent_states import StateLayout
from foretoken.models.stock.cache import HYBRID_LAYERS, STATE_LAYERS, RaggedCache
from foretoken.models.stock.rowwise import RowwiseSequence
from foretoken.sampling.draw import Draw
from moving import steady_times

# Families with recurrent states. On the native decoder, prefixes are reused. On torch, no prefix is
# cached: each prompt is prefilled
NATIVE = (
    "BambaForCausalLM",
    "FalconH1ForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "Lfm3ForCausalLM",
    "Mamba2ForCausalLM",
    "NemotronHForCausalLM",
    "OlmoHybridForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
)
TORCH = (
    *NATIVE,
    "BailingHybridForCausalLM",
    "FalconMambaForCausalLM",
    "JambaForCausalLM",
    "KimiLinearForCausalLM",
    "MambaForCausalLM",
    "Zamba2ForCausalLM",
    "ZambaForCausalLM",
)
ROW_BY_ROW = (
    "MiniMaxForCausalLM",
    "RecurrentGemmaForCausalLM",
    "RwkvForCausalLM",
    "ZayaForCausalLM",
    "xLSTMForCausalLM",
)
# They run row by row too, but are not compared here
LEFT_OUT = {
    "DeepseekV4ForCausalLM",
    "Inkling2ForCausalLM",
    "InklingForCausalLM",
    "Qwen4ExpForCausalLM",
}
# Their code does not support float64, mostly in the grouped product of experts
FLOAT32 = {
    "BailingHybridForCausalLM",
    "JambaForCausalLM",
    "MiniMaxForCausalLM",
    "NemotronHForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "RecurrentGemmaForCausalLM",
    "ZayaForCausalLM",
}
OFTEN = "Qwen3_5ForCausalLM"
CASES = [
    *(("native", n, d) for n in NATIVE for d in ("erring", "lookup", "hybrid", "self:int8")),
    *(("transformers", n, "erring") for n in (*TORCH, *ROW_BY_ROW)),
    *(("transformers", n, d) for n in hybrids.FAMILIES for d in ("lookup", "hybrid")),
]
LIMIT, GAMMA, MAX_ROWS = 24, 4, 3
BEGIN = tuple(3 + (11 * i * i + 5 * i) % 60 for i in range(150))


class ErringDrafter(Drafter):
    """Proposes the tokens of `outputs`, except at the positions 0, 1 and 6 of each 7, where its
    draft tokens are wrong: of the draft tokens of a step, all are accepted, or some, or none."""

    def __init__(self) -> None:
        self.outputs: list[list[int]] = []  # the requests' prompts and outputs
        self.seqs: list[list[int]] = []

    def start(self, rows: Any, prompts: list[list[int]], sources: Any) -> None:
        self.seqs += [list(prompt) for prompt in prompts]

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        return pack([self._continue(seq)[:g] for seq, g in zip(self.seqs, gamma, strict=True)])

    def _continue(self, seq: list[int]) -> list[int]:
        n = len(seq)
        rest = next((each[n:] for each in self.outputs if each[:n] == seq), [])
        return [3 + x % 60 if i % 7 in (0, 1, 6) else x for i, x in enumerate(rest, n)]

    def commit(self, tokens: list[list[int]]) -> None:
        for seq, new in zip(self.seqs, tokens, strict=True):
            seq += new

    def leave(self, rows: list[int]) -> None:
        self.seqs = [seq for b, seq in enumerate(self.seqs) if b not in rows]


@dataclass(frozen=True)
class Arrival:
    """A request that an engine gets after `step` steps.

    prompt: `shared` tokens that are in the prefix cache by then, and others.
    seed: The request is sampled if it is odd, else greedy.
    stop: Token ids that end the output.
    aborted: Whether the request is aborted after 9 tokens.
    """

    step: int
    prompt: tuple[int, ...]
    seed: int
    shared: int = 0
    stop: tuple[int, ...] = ()
    salt: str = ""
    aborted: bool = False

    def add(self, engine: Engine, gamma: int) -> int:
        return engine.add(
            [*self.prompt],
            gamma=gamma,
            temperature=float(self.seed % 2),
            seed=(self.seed, 0),
            stop_token_ids=self.stop,
            max_new_tokens=LIMIT,
            cache_salt=self.salt,
        )


@cache
def network(runtime: str, name: str) -> PreTrainedModel:
    made = hybrids.random(name, 0)
    return made.float() if runtime == "native" or name in FLOAT32 else made


@cache
def plain(runtime: str, name: str) -> Speculator:
    return load(network(runtime, name), "none", runtime=runtime)


@cache
def alone(runtime: str, name: str, arrival: Arrival) -> list[int]:
    """The output of a request in an engine of its own, without prefix cache and draft tokens."""
    with Engine(plain(runtime, name), 1, rule="coupled", prefix_cache=False) as engine:
        arrival.add(engine, 0)
        tokens: list[int] = []
        while engine.running or engine.waiting:
            tokens += [token for event in engine.step() for token in event.tokens]
    return tokens


class Comparison:
    """Serves requests in one engine, and counts outputs that differ from `alone`, draft tokens, and
    prompts of which other tokens than `shared` were in the prefix cache."""

    def __init__(self, runtime: str, name: str, draft: str) -> None:
        self.runtime, self.name, self.counts = runtime, name, Counter[str]()
        own = network(runtime, name)
        makers = {"erring": ErringDrafter, "hybrid": lambda: pairs.relative(own, 0.05)}
        self.spec = load(own, makers.get(draft, lambda: draft)(), runtime=runtime)

    def alone(self, arrival: Arrival) -> list[int]:
        return alone(self.runtime, self.name, arrival)

    def serve(self, engine: Engine, arrivals: list[Arrival], *, preempts: bool = False) -> Any:
        """Return the arrivals with their outputs. preempts: Whether a sequence is preempted before
        every third step of the first 30."""
        expected = [self.alone(each) for each in arrivals]
        if isinstance(self.spec.drafter, ErringDrafter):
            both = zip(arrivals, expected, strict=True)
            self.spec.drafter.outputs = [[*each.prompt, *output] for each, output in both]
        outputs, ids = [list[int]() for _ in arrivals], dict[int, int]()
        for step in count():
            new = [i for i, each in enumerate(arrivals) if each.step == step]
            ids |= {arrivals[i].add(engine, GAMMA): i for i in new}
            if len(ids) == len(arrivals) and not (engine.running or engine.waiting):
                break
            if preempts and step % 3 == 2 and step < 30 and engine.running:
                self.spec.core.preempt()
            for event in engine.step():
                i = ids[event.id]
                outputs[i] += event.tokens
                if event.completion is not None:
                    self._count(arrivals[i], event.completion.stats)
                    self.counts["different"] += outputs[i] != expected[i]
                elif arrivals[i].aborted and len(outputs[i]) > 8:
                    self.counts["different"] += outputs[i] != expected[i][: len(outputs[i])]
                    engine.abort(event.id)
        return [*zip(arrivals, outputs, strict=True)]

    def _count(self, arrival: Arrival, stats: Any) -> None:
        self.counts["accepted"] += stats.accepted
        self.counts["rejected"] += stats.drafted - stats.accepted
        self.counts["cached"] += stats.cached_tokens
        self.counts["cached otherwise"] += stats.cached_tokens != arrival.shared

    def run(self) -> Counter[str]:
        """Serve four waves of requests: prefixes of one sequence, the same prefixes again, outputs
        that continue, and more of them, after requests that were aborted or preempted."""
        lengths, known = (130, 64, 70, 33, 16, 130), (0, 0, 64, 0, 0, 70)
        with Engine(self.spec, MAX_ROWS, rule="coupled") as engine:
            first = [
                Arrival(6 * i, (*BEGIN[:n], 4 + i, 9, 7), 2 + i, shared)
                for i, (n, shared) in enumerate(zip(lengths, known, strict=True))
            ]
            done = self.serve(engine, first)
            again = [Arrival(i, (*BEGIN[:n], 20 + i, 5), 10 + i, n) for i, n in enumerate(lengths)]
            again += [self._make_ending(BEGIN[:70], 31, place) for place in (1, 3)]
            again += [Arrival(4, (*BEGIN[:70], 30), 15, salt="another")]
            done += self.serve(engine, again)
            third = [_continue(i, *each) for i, each in enumerate(done)]
            done = self.serve(engine, third, preempts=True)
            self.serve(engine, [_continue(i, *each) for i, each in enumerate(done[:7])])
            self.counts["preempted"] = engine.stats().preempted
        return self.counts

    def _make_ending(self, prefix: tuple[int, ...], tail: int, place: int) -> Arrival:
        """A request whose output ends at a position whose remainder by 7 is `place`: after a
        rejected draft token (1), or within draft tokens that are accepted (3)."""
        for i in count():
            arrival = Arrival(3, (*prefix, tail, i), 2 * i + 1, shared=len(prefix))
            for at, token in enumerate(output := self.alone(arrival)):
                end = (len(arrival.prompt) + at) % 7 == place
                if end and at > 4 and token not in output[:at]:
                    return Arrival(3, arrival.prompt, arrival.seed, len(prefix), (token,))
        raise AssertionError


def _continue(i: int, before: Arrival, output: list[int]) -> Arrival:
    """A request that continues another one and its output, all of which but the last token is in
    the cache."""
    prompt, aborted = (*before.prompt, *output), i % 3 == 0 and not before.aborted
    shared = len(prompt) - 1
    return Arrival(i, (*prompt, 40 + i, 8), 50 + i, shared, salt=before.salt, aborted=aborted)


@pytest.mark.daily("native Qwen3_5ForCausalLM erring", "transformers Lfm2ForCausalLM erring")
@pytest.mark.parametrize(
    ("runtime", "name", "draft"),
    [
        pytest.param(*case, id=" ".join(case), marks=[pytest.mark.native][: case[0] == "native"])
        for case in CASES
    ],
)
@pytest.mark.filterwarnings("ignore")  # of transformers' own code, at random configurations
def test_outputs_after_prefix_hits_are_those_of_requests_alone(
    runtime: str, name: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steady_times(monkeypatch)
    comparison = Comparison(runtime, name, draft)
    counts = comparison.run()
    assert not counts["different"]
    assert counts["rejected"] and counts["preempted"]
    assert counts["accepted"] or draft == "lookup"
    if runtime == "native":
        assert comparison.spec.exact == "bitwise"
        assert counts["cached"] and not counts["cached otherwise"]
    else:
        by_row = "transformers, row by row" if name in ROW_BY_ROW else "transformers"
        assert comparison.spec.target.runtime == by_row
        assert not counts["cached"]


def store_early(patch: pytest.MonkeyPatch) -> None:
    """Native: cache a state that was copied before the rejected draft tokens were rolled back."""
    early = dict[tuple[int, int], Any]()  # by the states' address and the length
    roll_back, copy_states = NativeModel.set_lengths, StateLayout.copy_states

    def set_lengths(self: NativeModel, lengths: list[int]) -> None:
        early.clear()
        for seq, length in zip(self.seqs, lengths, strict=True):
            if seq.states is not None and self.passes.states is not None and length < seq.length:
                self.passes.settle(seq.states, seq.length)
                copies = copy_states(self.passes.states, seq.states, seq.length)
                early[seq.states.address, length] = copies
        roll_back(self, lengths)

    def copy_early(self: StateLayout, states: Any, length: int) -> Any:
        return early.get((states.address, length)) or copy_states(self, states, length)

    patch.setattr(NativeModel, "set_lengths", set_lengths)
    patch.setattr(StateLayout, "copy_states", copy_early)


def leave_one_token(patch: pytest.MonkeyPatch) -> None:
    """On torch in batches: one rejected draft token stays in the recurrent states."""
    check_rewind = RaggedCache.check_rewind

    def check(self: RaggedCache, old: list[int], new: list[int]) -> None:
        check_rewind(self, old, new)
        pairs = zip(old, new, self.base_lengths, strict=True)
        self.base_lengths = [base - (n < before) for before, n, base in pairs]

    patch.setattr(RaggedCache, "check_rewind", check)


def leave_all_tokens(patch: pytest.MonkeyPatch) -> None:
    """On torch, row by row: all rejected draft tokens stay in the cache."""

    def roll_back(self: RowwiseSequence, length: int) -> None:
        del self.token_ids[length:]
        self.num_cached = min(self.num_cached, length)

    patch.setattr(RowwiseSequence, "roll_back", roll_back)


FAULTS = (
    pytest.param("native", OFTEN, store_early, id="native", marks=pytest.mark.native),
    pytest.param("transformers", "Lfm2ForCausalLM", leave_one_token, id="torch"),
    pytest.param("transformers", "xLSTMForCausalLM", leave_all_tokens, id="row by row"),
)


@pytest.mark.daily("native", "torch")
@pytest.mark.parametrize(("runtime", "name", "fault"), FAULTS)
def test_a_wrong_state_is_found(
    runtime: str, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative controls: faults like those of vLLM's issues 47194 and 53912."""
    steady_times(monkeypatch)
    comparison = Comparison(runtime, name, "erring")
    fault(monkeypatch)
    assert comparison.run()["different"]


@pytest.mark.prove
@pytest.mark.filterwarnings("ignore")  # of transformers' own code, at random configurations
def test_every_family_with_recurrent_states_is_here() -> None:
    families = json.loads(RESULT.read_text())["families"]
    runs = [each["name"] for each in families if each["outcome"] == "equal"]
    found = {name for name in runs if classes()[name] == "text" and keeps_states(name)}
    assert found <= {*TORCH, *ROW_BY_ROW, *LEFT_OUT}


def keeps_states(name: str) -> bool:
    """Whether a class's default configuration has layers with recurrent states."""
    made: Any = getattr(transformers, name)
    if made._is_stateful:
        return True
    try:
        layers = DynamicCache(config=made.config_class()).layers
    except Exception:  # the configuration has no defaults
        return False
    return bool({type(layer).__name__ for layer in layers} & (STATE_LAYERS | HYBRID_LAYERS))
