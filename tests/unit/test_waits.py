"""A step reads from a device once: counted on a CPU that is taken for one.

What comes of a model's weights, was made with a device or sent there is a device's; all else is
the host's. Each read of the first kind makes the host wait, and the two must not meet in an
operation. Where there is a GPU, the real thing is asked too.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

import blocks
import pairs
import tiny
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.models.graphs import GraphModel
from foretoken.models.stock.model import CausalModel
from foretoken.request import Request, SequenceState
from foretoken.sampling.acceptance_rules import EXACT_RULES
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.keys import SequenceKey
from foretoken.sampling.verifier import CoupledVerifier, Verifier, make_verifier
from foretoken.step import step
from foretoken.transfer import read_lists
from pairdrafts import eagle_file, on_graphs

pytestmark = pytest.mark.daily

READS = {"tolist", "item", "cpu", "numpy", "nonzero", "equal", "is_nonzero", "masked_select"}
READS |= {"__bool__", "__int__", "__float__", "__index__", "__contains__", "unique", "argwhere"}
MEETS = {"__get__", "to", "pad", "type_as"}  # of several places, and no arithmetic
CASES = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=1.0),
    "top-k": SamplingParams(temperature=0.8, top_k=5),
    "top-p": SamplingParams(temperature=0.8, top_p=0.9, min_p=0.01),
}


class Pretend(TorchFunctionMode):
    """Marks a device's tensors, counts the reads, and refuses a meeting with the host's."""

    def __init__(self, *networks: torch.nn.Module) -> None:
        super().__init__()
        self.schedule_tokens: list[str] = []
        for network in networks:
            for weight in (*network.parameters(), *network.buffers()):
                weight.there = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        there = [hasattr(x, "there") for x in tensors]
        if func == torch.Tensor.is_cpu.__get__:
            return not there[0]
        if func == torch.Tensor.device.__get__ and not there[0]:
            return torch.device("cpu", 1)  # elsewhere than what is marked
        if any(there) and name in READS:
            self.schedule_tokens.append(name)
        if any(there) and name not in MEETS:
            host = [x for x, mark in zip(tensors, there, strict=True) if not mark and x.ndim]
            assert not host, f"{name} of a device's tensor and the host's {host}"
        result = func(*args, **kwargs)
        moved = name == "to" and any(isinstance(x, torch.device) for x in tree_leaves(args))
        made = kwargs.get("device") is not None
        if name == "tensor" and made:
            self.schedule_tokens.append("tensor(device=)")  # a copy that is waited for
        if any(there) or moved or made:
            return tree_map(lambda x: self.marked(x, tensors), result)
        return result

    def marked(self, x: Any, given: list[torch.Tensor]) -> Any:
        if isinstance(x, torch.Tensor):
            if not hasattr(x, "there") and any(x is one for one in given):
                x = x.detach()  # the host's own stays the host's
            x.there = True
        return x


def fresh(params: SamplingParams) -> list[SequenceState]:
    prompts = enumerate(pairs.PROMPTS)
    return [
        SequenceState.from_request(Request(p, 50, SequenceKey(0, b), params=params))
        for b, p in prompts
    ]


def reads(
    params: SamplingParams,
    rule: str | Verifier,
    gammas: list[list[int]],
    drafter: Any,
    target: Any,
    lenience: float = 1.0,
) -> list[list[str]]:
    """Of every step, over ragged rows."""
    verifier = make_verifier(EXACT_RULES[rule], lenience) if isinstance(rule, str) else rule
    rows = fresh(params)
    parts = target, getattr(drafter, "model", None), getattr(drafter, "decoder", None)
    networks = [m.model for m in parts if m is not None]
    networks += [m.network for m in (getattr(drafter, "blocks", None),) if m is not None]
    found = []
    with Pretend(*networks) as pretend:
        sources = [[*prompt] for prompt in pairs.PROMPTS] if target.encoder_decoder else None
        target.start([row.tokens[:-1] for row in rows], sources)
        drafter.start([0, 1, 2], [list(row.tokens) for row in rows], sources)
        for gamma in gammas:
            pretend.schedule_tokens = []
            step(rows, target, drafter, verifier, gamma)
            found.append(pretend.schedule_tokens)
    return found


def networks(family: str = "Llama") -> tuple[Any, Any]:
    """Their own copies: marks stay on them."""
    target = pairs.target(family)
    return copy.deepcopy(target), pairs.relative(target)


@pytest.mark.cpu_only
@pytest.mark.parametrize("rule", [*EXACT_RULES, CoupledVerifier()])
@pytest.mark.parametrize(
    ("case", "family"), [*((case, "Llama") for case in CASES), ("sampled", "T5")]
)
def test_a_step_reads_once(case: str, family: str, rule: str | Verifier) -> None:
    big, small = networks(family)
    drafter = LMDrafter(GraphModel(small), pairs.V)
    gammas = [[4, 4, 4], [3, 0, 1], [0, 0, 0], [4, 4, 4]]
    reads_of = reads(CASES[case], rule, gammas, drafter, GraphModel(big))
    assert reads_of == [["tolist"]] * len(gammas)


@pytest.mark.cpu_only
@pytest.mark.parametrize("lenience", [1.0, 0.3])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["without graphs", "token by token", "lm", "lookup"])
def test_other_models_drafters_and_lenience(case: str, kind: str, lenience: float) -> None:
    """Without graphs: the ragged cache, as on a device that has none. Token by token: as a draft
    whose rows have different params."""
    models: list[Any] = [GraphModel(network) for network in networks()]
    if kind == "without graphs":
        models = [CausalModel(network) for network in networks()]
        for model in models:
            model.capabilities = replace(model.capabilities, tensors=True)
    if kind == "token by token":
        models[1].capabilities = replace(models[1].capabilities, chain=False)
    drafter = LookupDrafter() if kind == "lookup" else LMDrafter(models[1], pairs.V)
    gammas = [[4] * 3, [3, 0, 1]]
    assert reads(CASES[case], "block", gammas, drafter, models[0], lenience) == [["tolist"]] * 2


@pytest.mark.cpu_only
@pytest.mark.parametrize("case", CASES)
def test_a_draft_over_hidden_states(case: str) -> None:
    target = tiny.llama(pairs.V, context=256, num_hidden_layers=4).double()
    drafter: Any = on_graphs(target, eagle_file(pairs.V, (1, 2, 3)).read(target))
    drafter._table.there = True
    drafter.target.expose_hidden_states(drafter.count_cached_tokens)
    gammas = [[0] * 3, [4] * 3, [3, 0, 1], [4, 4, 4]]
    reads_of = reads(CASES[case], "block", gammas, drafter, drafter.target)
    assert reads_of == [["tolist"]] * len(gammas)
    assert drafter.decoder.chains


@pytest.mark.cpu_only
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("config", [blocks.ZLAB, blocks.DFLASH2, blocks.DOMINO, blocks.DSPARK])
def test_a_draft_by_blocks(config: dict[str, Any], case: str) -> None:
    network = tiny.llama(pairs.V, context=256, num_hidden_layers=4).double()
    target, made = blocks.graph_pair(config, network)
    drafter: Any = made
    for array in [x for layer in drafter.blocks.cache.list_parts() for x in layer.arrays]:
        array.there = True
    target.expose_hidden_states(drafter.count_cached_tokens)
    gammas = [[0] * 3, [4] * 3, [3, 0, 1], [4, 4, 4]]
    assert reads(CASES[case], "block", gammas, drafter, target) == [["tolist"]] * len(gammas)


class Reader(LMDrafter):
    """Wants to know every draft token."""

    def _propose_chained(self, uncached, budget, draw):
        return None

    def _build_next_blocks(self, ids, active):
        return [[token] if on else [] for token, on in zip(ids.tolist(), active, strict=True)]


@pytest.mark.cpu_only
def test_parts_of_different_batches_are_read_at_once() -> None:
    """Draft tokens are drawn for all rows, and only rows whose prompt has been read are judged."""
    with Pretend() as pretend:
        parts = [torch.ones(2, device="cpu"), torch.zeros(3, 1, device="cpu"), torch.tensor([7])]
        assert read_lists(*parts) == [[1.0, 1.0], [[0.0], [0.0], [0.0]], [7]]
    assert pretend.schedule_tokens == ["tolist"]


@pytest.mark.cpu_only
def test_a_read_per_draft_token_is_seen() -> None:
    big, small = networks()
    drafter = Reader(GraphModel(small), pairs.V)
    (reads_of,) = reads(CASES["greedy"], "block", [[4] * 3], drafter, GraphModel(big))
    assert len(reads_of) == 5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("case", CASES)
def test_the_host_waits_once_on_a_gpu(case: str) -> None:
    big, small = (network.float().cuda() for network in networks())
    target, drafter = GraphModel(big), LMDrafter(GraphModel(small), pairs.V)
    rows = fresh(CASES[case])
    target.start([row.tokens[:-1] for row in rows])
    drafter.start([0, 1, 2], [list(row.tokens) for row in rows], None)
    verifier = make_verifier(EXACT_RULES["block"])
    for _ in range(6):  # all is recorded
        step(rows, target, drafter, verifier, [4, 4, 4])
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchroniz") as waits:
            step(rows, target, drafter, verifier, [4, 4, 4])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waits) == 1
