"""Which runtime is the faster one on this CPU, for a model's shape and precision.

A copy with some layers of the model's own widths, random and with the same share of its vocabulary,
runs on each: passes over one token, over a few, and over a prompt; or over a token of each of many
rows, and over a prompt. As much memory as all of the model's layers take is read in between, so
that weights are as little in the caches as they will be. Done once for a shape, a precision, so
many rows and a machine, and kept. It does not know the model's weights.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import nn

from foretoken.costing.stored import machine
from foretoken.errors import RefusedError
from foretoken.models.base import Model
from foretoken.slow_log import log_if_slow
from foretoken.storage.cache import remember, remembered, versions
from foretoken.timing import measure_seconds, take_turns

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)

# The number is raised where a runtime's passes take another time, or others are measured
FILE, FORMAT = "runtimes.json", 3
TOKENS = {1: 96, 4: 64, 8: 8, 64: 4}  # passes over so many: plain decoding, draft tokens, a prompt
PAST = 64  # tokens of the text before
KINDS = 60  # of tokens in a pass
PROMPT = 64  # tokens in a pass from which on only the last one's logits are asked for
FIRST, ROUNDS = 1, 7  # rounds that warm up, and those that count
BITS = {"float32": 32, "int8": 8, "int4": 4}
MOST = 2**27  # bytes that are read between passes: more than most caches hold
WEIGHTS = 40_000_000  # of the copy's layers: in too few, what a pass takes besides them is most
# By how much another runtime must be ahead of the first, ONNX Runtime: its rows do not depend on
# each other, and it pays nothing where the size of passes changes, as it does in every other step
# with draft tokens. On OpenVINO a change took 6 ms in 30 layers and next to nothing in the copy.
AHEAD = 1.2
Make = Callable[["PreTrainedModel", str], Model]


class PassSize(NamedTuple):
    """So many tokens of each of so many rows."""

    rows: int
    tokens: int


class Fastest(NamedTuple):
    """A runtime by name, whether the choice is to be kept, and the seconds of all `passes` of some
    layers there."""

    runtime: str
    sure: bool
    seconds: float | None = None


def fastest(
    network: PreTrainedModel,
    dtype: str,
    runtimes: dict[str, Make],
    *,
    in_blocks: bool = False,
    rows: int = 1,
) -> Fastest:
    """Return the first runtime, or one on which the passes of usual texts, `passes`, take so much
    less time (`AHEAD`).

    Args:
        network: The model's structure, which may be on the meta device.
        dtype: The precision of its weights.
        runtimes: By name, functions that run a network in memory in a precision. Any that refuse
            it are left out; where no copy can be built, the first is taken.
        in_blocks: True for weights of a GGUF file, which are blocks of integers: the copy's
            then are, too, of four bits with an offset, as most files have them.
        rows: How many texts are decoded at a time.

    Returns:
        One of them. Times are kept whatever the machine did meanwhile: runtimes take turns, so
        other processes slow all of them, and the same one is chosen at every start.
    """
    from foretoken.models.stock.selfcheck import UNSEEN, shrunk  # late: takes seconds

    try:
        config = shrunk(network.config, None, each=_depth(network))
        _keep_share(config, network)
    except Exception:  # its code raises anything
        return Fastest(next(iter(runtimes)), True)
    said = {k: v for k, v in config.to_dict().items() if k not in UNSEEN}
    parts = [FORMAT, type(network).__qualname__, said, dtype, list(runtimes), machine(), versions()]
    parts += ["in blocks"] if in_blocks else []
    parts += [f"{rows} rows"] if rows > 1 else []
    key = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
    known = remembered(FILE).get(key, {}).get("seconds")
    if known is None or not set(known) <= set(runtimes):
        rest = np.ones(min(MOST, _weights(network) * BITS[dtype] // 8), np.uint8)
        with log_if_slow(log, "timing a few layers on %s, once", " and ".join(runtimes)):
            known = _measured(type(network), config, dtype, runtimes, rest, in_blocks, rows)
        width = getattr(config, "hidden_size", None)
        label = f"{type(network).__name__}, {width} wide, in {dtype}"
        label += " over a GGUF file's blocks" if in_blocks else ""
        remember(FILE, key, {"label": label, "rows": rows, "seconds": known})
    first, counts = next(iter(runtimes)), passes(rows).values()

    def spent(name: str) -> float:
        return sum(n * each for n, each in zip(counts, known[name], strict=False))

    best = min(known, key=lambda name: spent(name) * (AHEAD if name != first else 1), default=first)
    return Fastest(best, True, spent(best) if known.get(best) else None)


def passes(rows: int) -> dict[PassSize, int]:
    """Return how many passes of each size a usual text takes, or so many texts at a time: the more
    there are, the fewer draft tokens pay. Prompts are read one by one."""
    if rows == 1:
        return {PassSize(1, tokens): count for tokens, count in TOKENS.items()}
    scored = TOKENS[4] // rows
    return {
        PassSize(rows, 1): TOKENS[1] + TOKENS[4] - scored,
        PassSize(rows, 4): scored,
        PassSize(1, PROMPT): rows * TOKENS[PROMPT],
    }


def measured_for(rows: int) -> int:
    """Return the number of rows that is measured in place of so many: a power of four."""
    size = 1
    while size < rows:
        size *= 4
    return size


def _measured(
    kind: type[PreTrainedModel],
    config: Any,
    dtype: str,
    runtimes: dict[str, Make],
    rest: NDArray[np.uint8],
    in_blocks: bool,
    rows: int,
) -> dict[str, list[float]]:
    """Seconds of each pass on each runtime, the least of several in turns. rest: in place of the
    layers that the copy leaves out."""
    from foretoken.models.stock.selfcheck import stir  # late: as above

    make: Any = kind
    try:
        network = make(config).float().eval()
        stir(network)
        if in_blocks:
            _round_to_blocks(network)
    except Exception:  # as above
        return {}
    models: dict[str, Model] = {}
    for name, run in runtimes.items():
        try:
            models[name] = run(network, dtype)
            models[name].start([[1] * PAST] * rows)
        except RefusedError as error:
            log.debug("%s is not timed: %s", name, error)
    times: dict[str, list[float]] = {name: [] for name in models}
    alone = len(models) == 1 < len(runtimes)  # there is nothing to choose
    for each in () if alone else passes(rows):
        turns = {name: partial(_taken, model, each, rows, rest) for name, model in models.items()}
        rounds = list(take_turns(turns, ROUNDS, warm_up=FIRST))
        for name in models:  # the least: others may only lengthen it
            times[name].append(min(taken[name] for taken in rounds))
    said = "; ".join(
        f"{name} {', '.join(f'{1e3 * t:.2f}' for t in each)} ms" for name, each in times.items()
    )
    if models and not alone:
        sizes = ", ".join(f"{each.rows} x {each.tokens}" for each in passes(rows))
        log.debug("measured a few layers over %s tokens in %s: %s", sizes, dtype, said)
    return times


def _round_to_blocks(network: PreTrainedModel) -> None:
    """Round the weights of linear layers to blocks of 32 integers of four bits, with a scale and an
    offset in float16 each, in place; those of the output layer to eight bits, as files have it."""
    head = network.get_output_embeddings()
    for part in network.modules():
        if isinstance(part, nn.Linear) and part.in_features % 32 == 0:
            groups = part.weight.data.view(-1, 32)
            if part is head:
                scale = (groups.abs().amax(dim=1, keepdim=True) / 127).half().float()
                part.weight.data = ((groups / scale).round() * scale).view_as(part.weight)
                continue
            low, high = groups.aminmax(dim=1, keepdim=True)
            scale, offset = ((high - low) / 15).half().float(), low.half().float()
            integers = ((groups - offset) / scale).round().clamp(0, 15)
            part.weight.data = (integers * scale + offset).view_as(part.weight)


def _keep_share(config: PreTrainedConfig, network: PreTrainedModel) -> None:
    """Give a copy with some layers of each kind the same share of the vocabulary."""
    whole, part = (each.get_text_config(decoder=True) for each in (network.config, config))
    ids = whole.vocab_size * part.num_hidden_layers // whole.num_hidden_layers
    part.vocab_size = max(part.vocab_size, ids)


def _depth(network: PreTrainedModel) -> int:
    """Return how many layers of each kind the copy has: a third at most, as it has to be converted
    twice."""
    count = getattr(network.config.get_text_config(decoder=True), "num_hidden_layers", None) or 1
    return max(2, min(count // 3, int(WEIGHTS * count / _weights(network))))


def _weights(network: PreTrainedModel) -> int:
    """Count the weights of a model's layers."""
    shared = (network.get_input_embeddings(), network.get_output_embeddings())
    left_out = {id(weight) for part in shared if part is not None for weight in part.parameters()}
    return max(1, sum(w.numel() for w in network.parameters() if id(w) not in left_out))


def _taken(model: Model, size: PassSize, rows: int, rest: NDArray[np.uint8]) -> float:
    """Seconds of the second of two passes, of which the first may prepare it, behind a reading of
    `rest`. rows: in the model; those beyond `size.rows` get no new tokens."""
    tokens = size.tokens
    # the same token would meet the same experts
    new = [[1 + (b + i) % KINDS for i in range(tokens)] for b in range(size.rows)]
    blocks = [*new, *([] for _ in range(rows - size.rows))]
    need = [len(block) if tokens < PROMPT else min(1, len(block)) for block in blocks]
    model.score(blocks, need)  # all draft tokens are judged
    model.set_lengths([PAST] * rows)
    rest.max()
    seconds = measure_seconds(partial(model.score, blocks, need))
    model.set_lengths([PAST] * rows)
    return seconds
