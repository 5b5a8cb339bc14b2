"""The draft of a target that comes without one: a copy of its own where that pays, else look-up.

What pays is read from costs and acceptance measured on the pair, once for each kind of target and
machine. Does not know how a copy is made.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from foretoken import costs
from foretoken.costs import PLAIN, Costs
from foretoken.drafters.lookup import Repeats
from foretoken.errors import ForetokenError
from foretoken.gamma import MAX_GAMMA, Past, prices_of, rate
from foretoken.loading.own import OwnCopy
from foretoken.loading.sources import Source
from foretoken.speculator import Speculator
from foretoken.storage.cache import remember, remembered

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

FILE = "drafts.json"
LEAST = 1.05  # predicted tokens a second over plain decoding for which a copy is kept in memory
QUICK = 1e-3  # seconds of a plain step below which what lies outside the models outweighs guesses
KINDS = ("int4", "int8")
DEARER, BEST = 1.3, 0.99  # a draft in int8 against one in int4: its time at least, its alpha


def chosen(looking: Speculator, read: Source | PreTrainedModel) -> Speculator:
    """`looking`, which has a target, made from `read`, and looks up; or the same target drafting
    for itself, with look-up in front where a text repeats. What was chosen is logged."""
    if looking.target.runtime != "openvino":  # no other shares its rows
        return looking
    name = costs.key(looking.target, looking.drafter, FILE)
    known = remembered(FILE).get(name) if name else None
    kind = known if known in (*KINDS, "") else None
    if kind is None:
        best, sure = _fastest(looking, read)
        if name and sure:
            remember(FILE, name, best.draft_name.partition(":")[2])
    else:
        best = (_drafting(looking, read, kind) if kind else None) or looking
    log.info(
        "no draft was given: %s guesses%s",
        best.draft_name,
        "" if best is looking else ", and look-up where the text repeats",
    )
    return best


def _fastest(looking: Speculator, read: Source | PreTrainedModel) -> tuple[Speculator, bool]:
    """The best of all, and whether the costs that say so are steady ones."""
    if looking.step_costs(PLAIN).seconds(0) < QUICK:
        return looking, _kept(looking)
    best, most, sure = looking, LEAST, _kept(looking)
    bound = float("inf")
    for kind in KINDS:
        if bound <= most:
            break
        own = _drafting(looking, read, kind)
        if own is None:
            continue
        measured = own.step_costs(PLAIN)
        sure, gain = sure and _kept(own), _gain(measured)
        log.info("%s: %.2f times plain decoding is predicted", own.draft_name, gain)
        dearer = tuple((n, DEARER * seconds) for n, seconds in measured.draft)
        bound = _gain(replace(measured, draft=dearer, prior=(1.0, BEST)))
        if gain > most:
            best, most = own, gain
    return best, sure


def _drafting(looking: Speculator, read: Source | PreTrainedModel, kind: str) -> Speculator | None:
    """The target with its copy; None where there can be none."""
    name = f"self:{kind}"
    try:
        drafter = OwnCopy(name, kind, ()).attached(read, looking.target)
    except ForetokenError as error:
        log.info("%s cannot draft: %s", name, error)
        return None
    return replace(looking, drafter=drafter, draft_name=name, foresight=Repeats)


def _gain(measured: Costs) -> float:
    """Tokens a second over plain decoding, by costs and the acceptance seen with them."""
    prices = prices_of(measured, 1)
    return rate(Past(measured.prior), MAX_GAMMA, prices) * prices.alike[0]


def _kept(spec: Speculator) -> bool:
    name = costs.key(spec.target, spec.drafter, costs.kind(PLAIN), 1)
    return name is not None and costs.recall(name) is not None
