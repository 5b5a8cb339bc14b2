"""Choices made at loading: the draft of a target that comes without one, and the precision of a
draft for which none was asked.

Which one pays is read from costs and acceptance measured on the pair, when `Speculator.prepared`
asks: that converts drafts and takes up to minutes, for which no text waits. A choice is kept,
whatever the machine did meanwhile, until weights, precision, versions or the machine change: from
then on the draft that a command runs with is the same every time. Does not know how a model is
made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from operator import itemgetter
from typing import cast

from foretoken.costing import stored
from foretoken.costing.costs import PLAIN, Costs
from foretoken.costing.gamma import MAX_GAMMA, Past, prices_of, rate
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import Repeats
from foretoken.errors import FRONT, ForetokenError, base_name
from foretoken.loading.draft import own_copy
from foretoken.loading.options import ROUNDED, smaller
from foretoken.loading.target import LoadedTarget
from foretoken.speculator import Speculator
from foretoken.storage.cache import remember, remembered

log = logging.getLogger(__name__)

FILE = "drafts.json"
LEAST = 1.05  # predicted tokens a second over plain decoding for which a copy is kept in memory
QUICK = 1e-3  # seconds of a plain step below which what lies outside the models outweighs guesses
FASTER = 1.02  # predicted tokens a second for which a draft is rounded
DEARER, BEST = 1.3, 0.99  # a draft in int8 against one in int4: its time at least, its alpha


def chosen(looking: Speculator, target: LoadedTarget) -> Speculator:
    """Return `looking`, which looks up, or the same target drafting for itself, with look-up in
    front where a text repeats, as was chosen before: until it is, `looking`."""
    if looking.target.runtime != "native":  # no other shares its rows
        return looking
    drafting = cache(partial(_drafting, looking, target))

    def best(kind: str) -> Speculator:
        spec = (drafting(kind) if kind else None) or looking
        log.info("no draft was given: %s drafts", base_name(spec.draft_name))
        return spec

    return _decided(looking, lambda: _fastest(looking, drafting), best)


def rounded(spec: Speculator, dtype: str, make: Callable[[str], LMDrafter]) -> Speculator:
    """Return `spec`, whose draft is in `dtype`, or the same with its draft in eight or four bits,
    as was chosen before: until it is, `spec`."""
    made = cache(make)

    def best(kind: str) -> Speculator:
        if not kind:
            return spec
        log.info(
            "%s drafts in %s, which is faster; draft_dtype says otherwise",
            base_name(spec.draft_name),
            kind,
        )
        return replace(spec, drafter=made(kind))

    return _decided(spec, lambda: _quickest(spec, dtype, made), best)


def _decided(
    spec: Speculator, measure: Callable[[], str], best: Callable[[str], Speculator]
) -> Speculator:
    """Return the `best` for the rounding that was chosen for this pair, "" for none. Where there is
    none yet, return the pair, which is to `choose`: to measure, and keep what is found."""
    name = stored.key(spec.target, spec.drafter, FILE)
    kind = remembered(FILE).get(name) if name else None
    if kind in (*ROUNDED, ""):
        return best(cast(str, kind))

    def choose(asked: Speculator) -> Speculator:
        if asked.drafter is not spec.drafter:  # a user's own since
            return asked
        kind = measure()
        if name:
            remember(FILE, name, kind)
        return best(kind)

    return replace(spec, choose=choose)


def _quickest(spec: Speculator, dtype: str, made: Callable[[str], LMDrafter]) -> str:
    """Return the draft's fastest precision, "" where it has it."""
    best, base = "", spec.costing.step_costs(PLAIN)
    most = _rate(base)
    for fewer in smaller(dtype):
        try:
            other = replace(spec, drafter=made(fewer))
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
        best, most = fewer, tokens_per_second
    return best


def _fastest(looking: Speculator, drafting: Callable[[str], Speculator | None]) -> str:
    """Return the copy that is faster than look-up, "" where none is."""
    if looking.costing.step_costs(PLAIN).seconds(0) < QUICK:
        return ""
    best, most, bound = "", LEAST, float("inf")
    for kind in reversed(ROUNDED):
        own = drafting(kind) if bound > most else None
        if own is None:
            continue
        measured = own.costing.step_costs(PLAIN)
        gain = _gain(measured)
        log.info("%s: %.2f times plain decoding is predicted", own.draft_name, gain)
        dearer = tuple((n, DEARER * seconds) for n, seconds in measured.draft)
        bound = _gain(replace(measured, draft=dearer, prior=(1.0, BEST)))
        if gain > most:
            best, most = kind, gain
    return best


def _drafting(looking: Speculator, target: LoadedTarget, kind: str) -> Speculator | None:
    """Return the target with its copy; None where there can be none."""
    name = f"self:{kind}"
    try:
        drafter = own_copy(name, kind, target)
    except ForetokenError as error:
        log.info("%s cannot draft: %s", name, error)
        return None
    name = f"{FRONT}{name}"
    return replace(looking, drafter=drafter, draft_name=name, predicted_output=Repeats)


def _gain(measured: Costs) -> float:
    """Return tokens a second over plain decoding."""
    return _rate(measured) * measured.seconds(0)


def _rate(measured: Costs) -> float:
    """Return tokens a second, by costs and the acceptance seen with them."""
    return rate(Past(measured.prior), MAX_GAMMA, prices_of(measured, 1))
