"""A transformers decoder as an OpenVINO graph whose keys and values are state: the form from which
OpenVINO makes paged attention.

transformers' own forward is traced once; only the attention function is ours, and it is a plain
product. The output layer runs only at the needed positions. This form can be kept on disk, a graph
with the paged operator cannot be read back. It does not know how the graph is run.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as ops
from openvino._offline_transformations import apply_make_stateful_transformation
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from foretoken.errors import RefusedError
from foretoken.models.openvino.export_states import EXAMPLE, GRID, Grid, Sizes, TracedCache
from foretoken.models.openvino.tracing import Exported, traced
from foretoken.models.stock.attention import Forward, KeptPositions, separate
from foretoken.models.stock.cache import (
    KEEPS_BOTH,
    KEEPS_NOTHING,
    KEEPS_STATE,
    KEEPS_TOKENS,
    given,
)
from foretoken.models.stock.positions import takes_positions
from foretoken.models.stock.sizes import context_limit, output_rows, switch_of
from foretoken.models.stock.sizes import positions as positions_of

PAST = 3  # tokens in the cache while tracing
NAMES = ("input_ids", "position_ids", "attention_mask", "needed")
BEYOND = ("softcap", "s_aux", "position_bias")  # kinds of attention without a paged form

MASK: ContextVar[Tensor | None] = ContextVar("foretoken_export_mask", default=None)


def export_paged(model: PreTrainedModel, taps: tuple[int, ...] = ()) -> Exported:
    """Graph "decoder" of a decoder-only `model`: inputs input_ids, or inputs_embeds of one that
    `reads` these; position_ids, attention_mask, needed (flat positions that go through the head),
    beam_idx; outputs logits and hidden at them and, with `taps`, shown: the states there, of all
    tokens. Graph "join" of a model that has one, of states alone.

    Raises RefusedError for attention that has no paged form. The graph shares the model's weights;
    the model itself stays as it is.
    """
    stock = DynamicCache(config=model.config).layers
    kinds = {type(layer).__name__ for layer in stock}
    if kinds - KEEPS_TOKENS - KEEPS_STATE - KEEPS_BOTH - KEEPS_NOTHING:
        raise RefusedError(f"{type(model).__name__} has layers without keys of their own")
    running = Forward(model, "foretoken_export", "foretoken_export", taps)
    with torch.no_grad():
        sizes, past = examples(running, stock)
        separate(running.model)
        states = [torch.zeros(1, *shape) for shape in sizes.inputs().values()]
        shape = (2, 1) if states else (1, 2)
        ids = example(model, *shape)
        mask = torch.ones(len(ids), PAST + ids.shape[1]).long()
        positions = (PAST + torch.arange(2)).view(shape)
        grid = EXAMPLE if states else ()
        inputs = (ids, positions, mask, torch.tensor([1]), *grid, *states, *past)
        graph = traced(Traced(running, stock, sizes, taps), inputs)
        graphs = {"decoder": graph, **joins(model)}
    keep_state(graph, past, sizes, ids, shows=bool(taps))
    config = model.config.get_text_config(decoder=True)
    keeping = [x for x in stock if type(x).__name__ in KEEPS_TOKENS | KEEPS_BOTH]
    facts = {
        "form": "paged",
        "vocab_size": output_rows(model),
        "context": context_limit(config),
        "longest": positions_of(config) if switch_of(model) else None,  # where it is another
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "windows": [getattr(layer, "sliding_window", None) or 0 for layer in keeping],
    }
    if states:
        facts |= {"states": sizes._asdict(), "layers": len(stock)}
    return Exported(graphs, facts | ({"taps": list(taps)} if taps else {}))


def example(model: PreTrainedModel, *shape: int) -> Tensor:
    """Tokens as `model` reads them: ids, or what a decoder of pairs reads."""
    reads = getattr(model, "reads", None)
    return torch.ones(*shape, dtype=torch.long) if reads is None else torch.zeros(*shape, reads)


def joins(model: PreTrainedModel) -> dict[str, ov.Model]:
    """The graph that makes one state of several, of a model that has one."""
    join = getattr(model, "join", None)
    if join is None:
        return {}
    width = join.fc.in_features
    graph = traced(join, (torch.zeros(2, width),))
    graph.input(0).get_node().set_partial_shape(ov.PartialShape([-1, width]))
    graph.validate_nodes_and_infer_types()
    return {"join": graph}


class Traced(torch.nn.Module):
    """One forward over an explicit past, as the tracer sees it. With states every token has a row
    of its own, as it has in a flat pass."""

    def __init__(
        self, running: Forward, stock: list[Any], sizes: Sizes, taps: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.running, self.model, self.stock, self.sizes = running, running.model, stock, sizes
        self.taps = taps
        self.eval()

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor,
        needed: Tensor,
        *past: Tensor,
    ) -> tuple[Tensor, ...]:
        token = MASK.set(((1.0 - attention_mask.float()) * -1e9)[:, None, None, :])
        cache = self._cache(list(past))
        kept = KeptPositions(needed)
        noted: dict[int, Tensor] = {}
        try:
            with self.running(cache if any(self.sizes) else None, kept, noted) as model:
                logits = model(
                    **given_ids(model, input_ids, position_ids),
                    **given(model, cache),
                    use_cache=True,
                    return_dict=True,
                ).logits
        finally:
            MASK.reset(token)
        seen = [noted[j].flatten(0, 1).float() for j in self.taps]
        shown = [torch.cat(seen, -1)] if seen else []
        return logits.float(), kept.hidden.float(), *cache.made(), *shown, *flat(cache)

    def _cache(self, past: list[Tensor]) -> TracedCache:
        grid, states = EXAMPLE, dict[str, Tensor]()
        if any(self.sizes):
            grid, past = Grid(*past[: len(GRID)]), past[len(GRID) :]
            names = self.sizes.inputs()
            states, past = dict(zip(names, past, strict=False)), past[len(names) :]
        cache = TracedCache(self.stock, grid, states)
        for i, layer in enumerate(cache.keeping()):
            keys, values = past[2 * i], past[2 * i + 1]
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        return cache


def given_ids(model: PreTrainedModel, ids: Tensor, positions: Tensor) -> dict[str, Tensor]:
    """The tokens, and their positions where the model is given any."""
    positioned = {"position_ids": positions} if takes_positions(model) else {}
    return {"input_ids" if ids.ndim == 2 else "inputs_embeds": ids, **positioned}


def flat(cache: TracedCache) -> list[Any]:
    """Keys and values, layer by layer."""
    return [x for layer in cache.keeping() for x in (layer.keys, layer.values)]


def plain(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention that the paged operator replaces, which adds causality, rows and windows."""
    for name in BEYOND:
        if kwargs.get(name) is not None:
            raise RefusedError(f"{type(module).__name__} has {name}, paged attention has not")
    groups = getattr(module, "num_key_value_groups", 1)
    if groups > 1:
        key, value = repeated(key, groups), repeated(value, groups)
    states = F.scaled_dot_product_attention(query, key, value, attn_mask=MASK.get(), scale=scaling)
    return states.transpose(1, 2).contiguous(), None


def repeated(x: Tensor, groups: int) -> Tensor:
    """Keys once per query head; the transformation matches this pattern and removes it."""
    B, heads, n, dim = x.shape
    x = x[:, :, None].expand(B, heads, groups, n, dim)
    return x.reshape(B, heads * groups, n, dim)


def each_expert(module: Any, states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Mixture of experts in a form for tracing: every expert on the tokens that chose it, which may
    be none. Stock code loops over the chosen experts, which a trace would freeze."""
    total = torch.zeros_like(states)
    for expert in range(module.num_experts):
        token, place = torch.where(top_k_index == expert)
        inner = linear(module, states[token], expert, "gate_up" if module.has_gate else "up")
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        inner = linear(module, inner, expert, "down")
        if module.has_post_expert_norm:
            inner = module.post_expert_norm(inner)
        total = total.index_add(0, token, inner * top_k_weights[token, place, None])
    return total


def linear(module: Any, x: Tensor, expert: int, name: str) -> Tensor:
    weight = getattr(module, f"{name}_proj")[expert]
    bias = getattr(module, f"{name}_proj_bias")[expert] if module.has_bias else None
    return F.linear(x, weight.T if module.is_transposed else weight, bias)


AttentionInterface.register("foretoken_export", plain)
ExpertsInterface.register("foretoken_export", each_expert)
AttentionMaskInterface.register("foretoken_export", lambda *args, **kwargs: None)


def examples(running: Forward, stock: list[Any]) -> tuple[Sizes, list[Tensor]]:
    """The sizes of a model's states, and zero keys and values of PAST tokens, in the shapes that
    its layers make."""
    cache = TracedCache(stock, EXAMPLE, {})
    hybrid = any(type(x).__name__ in KEEPS_STATE | KEEPS_BOTH for x in stock)
    shape = (2, 1) if hybrid else (1, PAST)
    ids = example(running.model, *shape)
    with running(cache if hybrid else None) as model:
        model(
            **given_ids(model, ids, torch.arange(shape[0] * shape[1]).view(shape)),
            **given(model, cache),
            use_cache=True,
        )
    past = [x.new_zeros(*x.shape[:2], PAST, x.shape[3]) for x in flat(cache)]
    if not past:
        raise RefusedError(f"{type(running.model).__name__} has no keys and values to page")
    return cache.used, past


def keep_state(
    graph: ov.Model, past: list[Tensor], sizes: Sizes, ids: Tensor, *, shows: bool
) -> None:
    """Names and free shapes for the inputs; keys and values become state, empty at first. ids: as
    `example` makes them; shows: whether there are states to show."""
    more = [*GRID, *sizes.inputs()] if any(sizes) else []
    first = NAMES[0] if ids.ndim == 2 else "inputs_embeds"
    named = [first, *NAMES[1:], *more]
    names = [*named, *(f"past.{i}" for i in range(len(past)))]
    shapes = [free_shape(i, past, sizes) for i in range(len(names))]
    shapes[0] = ov.PartialShape([-1, -1, *ids.shape[2:]])
    for port, name, shape in zip(graph.inputs, names, shapes, strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_partial_shape(shape)
    graph.input(first).get_node().set_friendly_name(first)  # the transformation asks for it
    states = [f"present.{i}" for i in range(len(past))]
    made = [*sizes.outputs(), *["shown"] * shows]
    for port, name in zip(graph.outputs, ["logits", "hidden", *made, *states], strict=True):
        port.get_tensor().set_names({name})
    graph.validate_nodes_and_infer_types()
    order: Any = ops.parameter([-1], np.int32, name="beam_idx")
    order.output(0).get_tensor().add_names({"beam_idx"})
    graph.add_parameters([order])
    for name in names[len(named) :]:  # the transformation knows a cache by this gather
        source = graph.input(name).get_node().output(0)
        readers = list(source.get_target_inputs())
        gathered: Any = ops.gather(source, order, ops.constant(0))
        for reader in readers:
            reader.replace_source_output(gathered.output(0))
    graph.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(graph, dict(zip(names[len(named) :], states, strict=True)))
    start_empty(graph, first)
    graph.validate_nodes_and_infer_types()


def free_shape(i: int, past: list[Tensor], sizes: Sizes) -> ov.PartialShape:
    free = [[-1, -1], [-1, -1], [-1, -1], [-1]]  # NAMES
    if any(sizes):
        free += [[-1, -1], [-1], [-1], *([-1, *shape] for shape in sizes.inputs().values())]
    free += [[-1, x.shape[1], -1, x.shape[3]] for x in past]
    return ov.PartialShape(free[i])


def start_empty(graph: ov.Model, ids: str) -> None:
    """State begins without tokens, for as many rows as the ids have."""
    shape: Any = ops.shape_of(graph.input(ids), output_type="i64")
    rows = ops.gather(shape, ops.constant([0]), ops.constant(0))
    for node in graph.get_ops():
        if node.get_type_name() == "ReadValue":
            _, heads, _, dim = node.get_output_partial_shape(0)
            sizes = [rows, *(ops.constant([n]) for n in (heads.get_length(), 0, dim.get_length()))]
            zero: Any = ops.constant(0.0, dtype=node.get_output_element_type(0))
            node.set_arguments([ops.broadcast(zero, ops.concat(sizes, axis=0))])
