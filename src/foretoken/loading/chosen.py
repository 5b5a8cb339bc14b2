"""Choices made at loading: the draft of a target that comes without one, and the precision of a
draft for which none was asked.

Which one pays is read from costs and acceptance measured on the pair. A choice is kept, whatever
the machine did meanwhile, until weights, precision, versions or the machine change: the draft that
a command runs with is the same every time. Does not know how a model is made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import cast

from foretoken.costing import stored
from foretoken.costing.costs import PLAIN, Costs
from foretoken.costing.gamma import MAX_GAMMA, Past, prices_of, rate
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import Repeats
from foretoken.errors import ForetokenError
from foretoken.loading.options import ROUNDED
from foretoken.loading.pending import ModelDraft, OwnCopy
from foretoken.loading.target import LoadedTarget
from foretoken.speculator import Speculator
from foretoken.storage.cache import remember, remembered

log = logging.getLogger(__name__)

FILE = "drafts.json"
LEAST = 1.05  # predicted tokens a second over plain decoding for which a copy is kept in memory
QUICK = 1e-3  # seconds of a plain step below which what lies outside the models outweighs guesses
KINDS = ("int4", "int8")
SMALL = 2_000_000  # parameters of a draft from which on its weights are worth rounding
FASTER = 1.02  # predicted tokens a second for which a draft is rounded
DEARER, BEST = 1.3, 0.99  # a draft in int8 against one in int4: its time at least, its alpha


def chosen(looking: Speculator, target: LoadedTarget) -> Speculator:
    """Return `looking`, which looks up, or the same target drafting for itself, with look-up in
    front where a text repeats. The choice is logged."""
    if looking.target.runtime != "openvino":  # no other shares its rows
        return looking
    name = stored.key(looking.target, looking.drafter, FILE)
    remembered_kind = remembered(FILE).get(name) if name else None
    kind = remembered_kind if remembered_kind in (*KINDS, "") else None
    if kind is None:
        best = _fastest(looking, target)
        if name:
            remember(FILE, name, best.draft_name.partition(":")[2])
    else:
        best = (_drafting(target, kind) if kind else None) or looking
    log.info(
        "no draft was given: %s guesses%s",
        best.draft_name,
        "" if best is looking else ", and look-up where the text repeats",
    )
    return best


def rounded(spec: Speculator, draft: ModelDraft) -> Speculator:
    """Return `spec`, or the same with its draft in eight or four bits. The choice is logged, where
    it is another."""
    if spec.target.runtime != "openvino" or draft.facts.parameters < SMALL:
        return spec
    make = partial(draft.rounded, V=spec.target.vocab_size)
    name = stored.key(spec.target, spec.drafter, FILE)
    remembered_kind = remembered(FILE).get(name) if name else None
    if remembered_kind in (*ROUNDED, ""):
        kind = cast(str, remembered_kind)
        best = replace(spec, drafter=make(kind)) if kind else spec
    else:
        best, kind = _quickest(spec, draft.placement.dtype, make)
        if name:
            remember(FILE, name, kind)
    if kind:
        log.info(
            "%s drafts in %s, which is faster; draft_dtype says otherwise", spec.draft_name, kind
        )
    return best


def _quickest(
    spec: Speculator, dtype: str, make: Callable[[str], LMDrafter]
) -> tuple[Speculator, str]:
    """Return the fastest, and its precision if it is another one."""
    best, kind, base = spec, "", spec.costing.step_costs(PLAIN)
    most = _rate(base)
    for fewer in ROUNDED[ROUNDED.index(dtype) + 1 if dtype in ROUNDED else 0 :]:
        try:
            other = replace(spec, drafter=make(fewer))
        except ForetokenError as error:
            log.info("%s cannot draft in %s: %s", spec.draft_name, fewer, error)
            break
        measured = other.costing.step_costs(PLAIN)
        # one text tells two acceptances apart no better than by luck; eight bits cost none
        prior = (
            base.prior if fewer == "int8" else min(base.prior, measured.prior, key=itemgetter(1))
        )
        tokens_per_second = _rate(replace(measured, prior=prior))
        if tokens_per_second < FASTER * most:  # four bits gain nothing where eight do not
            break
        best, kind, most = other, fewer, tokens_per_second
    return best, kind


def _fastest(looking: Speculator, target: LoadedTarget) -> Speculator:
    """Return the fastest of look-up and the copies."""
    if looking.costing.step_costs(PLAIN).seconds(0) < QUICK:
        return looking
    best, most = looking, LEAST
    bound = float("inf")
    for kind in KINDS:
        if bound <= most:
            break
        own = _drafting(target, kind)
        if own is None:
            continue
        measured = own.costing.step_costs(PLAIN)
        gain = _gain(measured)
        log.info("%s: %.2f times plain decoding is predicted", own.draft_name, gain)
        dearer = tuple((n, DEARER * seconds) for n, seconds in measured.draft)
        bound = _gain(replace(measured, draft=dearer, prior=(1.0, BEST)))
        if gain > most:
            best, most = own, gain
    return best


def _drafting(target: LoadedTarget, kind: str) -> Speculator | None:
    """Return the target with its copy; None where there can be none."""
    name = f"self:{kind}"
    try:
        drafter = OwnCopy(name, kind, ()).attach(target)
    except ForetokenError as error:
        log.info("%s cannot draft: %s", name, error)
        return None
    return target.speculator(drafter, name, Repeats)


def _gain(measured: Costs) -> float:
    """Return tokens a second over plain decoding."""
    return _rate(measured) * measured.seconds(0)


def _rate(measured: Costs) -> float:
    """Return tokens a second, by costs and the acceptance seen with them."""
    return rate(Past(measured.prior), MAX_GAMMA, prices_of(measured, 1))
