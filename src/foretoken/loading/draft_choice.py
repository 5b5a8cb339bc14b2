"""Chooses a draft if the caller of `load` gives no draft, and a precision for a draft that is given
without a precision.

`Speculator.prepared` makes the choice, from costs and acceptance measured on the pair. Measuring
converts drafts and takes up to minutes, so requests do not wait for the choice. The choice is
stored, so that a command runs with the same draft each time, until weights, precision, versions or
the machine change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from operator import itemgetter
from typing import cast

from foretoken.costing import stored_costs
from foretoken.costing.costs import DEFAULT_PARAMS, Costs
from foretoken.costing.gamma import (
    MAX_GAMMA,
    AcceptanceEstimate,
    find_best_token_rate,
    make_cost_table,
)
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import RepeatPrediction
from foretoken.errors import LOOKUP_PREFIX, ForetokenError, get_base_name
from foretoken.loading.draft import make_target_copy
from foretoken.loading.options import ROUNDED_DTYPES, list_smaller_dtypes
from foretoken.loading.target import LoadedTarget
from foretoken.speculator import Speculator
from foretoken.storage.cache import load_cached_values, save_cached_value

log = logging.getLogger(__name__)

DRAFT_CHOICES_FILE = "drafts.json"
MIN_COPY_SPEEDUP = 1.05  # predicted speedup over plain decoding: a copy takes memory
MIN_STEP_SECONDS = 1e-3  # without draft: in shorter steps, work outside the models dominates
MIN_ROUNDING_SPEEDUP = 1.02  # predicted speedup of a rounded draft over the unrounded one
# Assumptions about an int8 draft: its minimum time relative to an int4 draft, and its maximum alpha
MIN_INT8_TIME_RATIO, MAX_INT8_ALPHA = (1.3, 0.99)


def choose_draft(lookup_spec: Speculator, target: LoadedTarget) -> Speculator:
    """Return the Speculator that the stored choice selects: `lookup_spec`, or a Speculator that
    drafts by look-up in sequences that repeat themselves, else with a rounded copy of the target.
    Without a stored choice, return `lookup_spec` with a `choose` that measures."""
    if lookup_spec.target.runtime != "native":  # only the native backend shares its KV cache
        return lookup_spec
    make_copy_spec = cache(partial(_make_copy_spec, lookup_spec, target))

    def apply(kind: str) -> Speculator:
        spec = (make_copy_spec(kind) if kind else None) or lookup_spec
        log.info("no draft was given: %s drafts", get_base_name(spec.draft_name))
        return spec

    return _apply_stored_choice(
        lookup_spec, lambda: _measure_fastest_copy(lookup_spec, make_copy_spec), apply
    )


def choose_draft_dtype(
    spec: Speculator, dtype: str, make: Callable[[str], LMDrafter]
) -> Speculator:
    """Return the Speculator that the stored choice selects: `spec`, whose draft is in `dtype`, or
    `spec` with the drafter that `make` returns for int8 or int4. Without a stored choice, return
    `spec` with a `choose` that measures."""
    make_cached = cache(make)

    def apply(kind: str) -> Speculator:
        if not kind:
            return spec
        log.info(
            "%s drafts in %s, which is faster; set draft_dtype to choose another dtype",
            get_base_name(spec.draft_name),
            kind,
        )
        return replace(spec, drafter=make_cached(kind))

    return _apply_stored_choice(
        spec, lambda: _measure_fastest_dtype(spec, dtype, make_cached), apply
    )


def _apply_stored_choice(
    spec: Speculator, measure: Callable[[], str], apply: Callable[[str], Speculator]
) -> Speculator:
    """Return `apply(choice)` if a choice is stored for the target and drafter of `spec`: "int8",
    "int4", or "" for no rounded draft. Otherwise return `spec` with its field `choose` set to a
    function that measures, stores and applies the choice."""
    name = stored_costs.make_key(spec.target, spec.drafter, DRAFT_CHOICES_FILE)
    kind = load_cached_values(DRAFT_CHOICES_FILE).get(name) if name else None
    if kind in (*ROUNDED_DTYPES, ""):
        return apply(cast(str, kind))

    def choose(current: Speculator) -> Speculator:
        if current.drafter is not spec.drafter:  # the caller has set another drafter since
            return current
        kind = measure()
        if name:
            save_cached_value(DRAFT_CHOICES_FILE, name, kind)
        return apply(kind)

    return replace(spec, choose=choose)


def _measure_fastest_dtype(spec: Speculator, dtype: str, make: Callable[[str], LMDrafter]) -> str:
    """Return the rounded dtype in which the draft is predicted to give the most tokens per second;
    "" if no rounded dtype is predicted to be faster than `dtype`, the draft's present dtype."""
    best, base = "", spec.costing.get_step_costs(DEFAULT_PARAMS)
    best_rate = _predict_tokens_per_second(base)
    for smaller_dtype in list_smaller_dtypes(dtype):
        try:
            rounded_spec = replace(spec, drafter=make(smaller_dtype))
        except ForetokenError as error:
            log.info("%s cannot draft in %s: %s", spec.draft_name, smaller_dtype, error)
            break
        measured = rounded_spec.costing.get_step_costs(DEFAULT_PARAMS)
        # Measuring one sequence cannot distinguish two close acceptances. Rounding to int8 does not
        # change acceptance; for int4, take the lower of the two acceptances
        prior = (
            base.prior
            if smaller_dtype == "int8"
            else min(base.prior, measured.prior, key=itemgetter(1))
        )
        tokens_per_second = _predict_tokens_per_second(replace(measured, prior=prior))
        # If int8 gains nothing, int4 does not either
        if tokens_per_second < MIN_ROUNDING_SPEEDUP * best_rate:
            break
        best, best_rate = smaller_dtype, tokens_per_second
    return best


def _measure_fastest_copy(
    lookup_spec: Speculator, make_copy_spec: Callable[[str], Speculator | None]
) -> str:
    """Return the rounded dtype of the target's fastest copy; "" if no copy is predicted to be
    faster than plain decoding by MIN_COPY_SPEEDUP."""
    if lookup_spec.costing.get_step_costs(DEFAULT_PARAMS).step_seconds(0) < MIN_STEP_SECONDS:
        return ""
    best, best_speedup, bound = "", MIN_COPY_SPEEDUP, float("inf")
    for kind in reversed(ROUNDED_DTYPES):
        copy_spec = make_copy_spec(kind) if bound > best_speedup else None
        if copy_spec is None:
            continue
        measured = copy_spec.costing.get_step_costs(DEFAULT_PARAMS)
        speedup = _predict_speedup(measured)
        log.info("%s: predicted speedup over plain decoding: %.2f", copy_spec.draft_name, speedup)
        int8_costs = tuple((n, MIN_INT8_TIME_RATIO * seconds) for n, seconds in measured.draft)
        bound = _predict_speedup(replace(measured, draft=int8_costs, prior=(1.0, MAX_INT8_ALPHA)))
        if speedup > best_speedup:
            best, best_speedup = kind, speedup
    return best


def _make_copy_spec(lookup_spec: Speculator, target: LoadedTarget, kind: str) -> Speculator | None:
    """Return a Speculator that drafts by look-up and with a copy of the target in the dtype `kind`;
    None if such a copy cannot be made."""
    name = f"self:{kind}"
    try:
        drafter = make_target_copy(name, kind, target)
    except ForetokenError as error:
        log.info("%s cannot draft: %s", name, error)
        return None
    name = f"{LOOKUP_PREFIX}{name}"
    return replace(lookup_spec, drafter=drafter, draft_name=name, predicted_output=RepeatPrediction)


def _predict_speedup(measured: Costs) -> float:
    return _predict_tokens_per_second(measured) * measured.step_seconds(0)


def _predict_tokens_per_second(measured: Costs) -> float:
    """Return the predicted tokens per second, from costs and the acceptance in `measured.prior`."""
    return find_best_token_rate(
        AcceptanceEstimate(measured.prior), MAX_GAMMA, make_cost_table(measured, 1)
    )
