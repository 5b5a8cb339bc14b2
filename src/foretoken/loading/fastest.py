"""Which runtime is the faster one on this CPU, for a model's shape and precision.

A copy with a few layers of the model's own widths, random and without its vocabulary, runs on each:
passes over one token, over a few, and over a prompt. Done once for a shape, a precision and a
machine, and kept. It does not know the model's weights.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from math import prod
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from foretoken.costing.stored import machine
from foretoken.errors import RefusedError
from foretoken.models.base import Model
from foretoken.storage.cache import remember, remembered, versions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

FILE = "runtimes.json"
TOKENS = (1, 4, 8, 64)  # of a pass: plain decoding, draft tokens scored, and a prompt
PAST = 64  # tokens of the text before
ROUNDS = 7  # of which the median counts
Make = Callable[["PreTrainedModel", str], Model]


def fastest(network: PreTrainedModel, dtype: str, runtimes: dict[str, Make]) -> str:
    """Return the runtime whose passes take the least time, by the geometric mean over `TOKENS`.

    Args:
        network: The model's structure, which may be on the meta device.
        dtype: The precision of its weights.
        runtimes: By name, functions that run a network in memory in a precision. Any that refuse
            it are left out; where no copy can be built, the first is taken.

    Returns:
        The name of one of them.
    """
    from foretoken.models.stock.selfcheck import UNSEEN, shrunk  # late: takes seconds

    try:
        config = shrunk(network.config, None)
    except Exception:  # its code raises anything
        return next(iter(runtimes))
    said = {k: v for k, v in config.to_dict().items() if k not in UNSEEN}
    parts = [type(network).__qualname__, said, dtype, list(runtimes), machine(), versions()]
    name = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
    known = remembered(FILE).get(name)
    if not isinstance(known, dict) or not set(known) <= set(runtimes):
        known = _measured(type(network), config, dtype, runtimes)
        remember(FILE, name, known)
    if not known:
        return next(iter(runtimes))
    return min(known, key=lambda name: prod(known[name]))


def _measured(
    kind: type[PreTrainedModel], config: Any, dtype: str, runtimes: dict[str, Make]
) -> dict[str, list[float]]:
    """Seconds of each pass on each runtime, measured in turns."""
    from foretoken.models.stock.selfcheck import stir  # late: as above

    make: Any = kind
    try:
        network = make(config).float().eval()
        stir(network)
    except Exception:  # as above
        return {}
    models: dict[str, Model] = {}
    for name, run in runtimes.items():
        try:
            models[name] = run(network, dtype)
            models[name].start([[1] * PAST])
        except RefusedError as error:
            log.debug("%s is not timed: %s", name, error)
    times = {name: [_taken(models, name, n) for n in TOKENS] for name in models}
    said = "; ".join(
        f"{name} {', '.join(f'{1e3 * t:.2f}' for t in each)}" for name, each in times.items()
    )
    log.info("milliseconds of a few layers over %s tokens in %s: %s", TOKENS, dtype, said)
    return times


def _taken(models: dict[str, Model], name: str, tokens: int) -> float:
    """Median seconds of a pass; the first ones prepare it."""
    model, times = models[name], list[float]()
    for _ in range(2 + ROUNDS):
        start = perf_counter()
        model.score([[1] * tokens], [1])
        times.append(perf_counter() - start)
        model.set_lengths([PAST])
    return median(times[2:])
