"""Images, a token a pixel along the raster (the paper's Discussion: "it might work well in other
domains (e.g. images)"): how often draft tokens are kept at every pixel, images with and without
draft tokens side by side, and whether the first row's distribution is the target's.

The distribution is enumerated: the probability of every beginning of an image that is not rare,
and of all the rare ones together that go on from it. A method that is not exact must fail the test.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import isqrt
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from foretoken.errors import InputError
from foretoken.inputs import Prompt
from foretoken.lease import hold_lease
from foretoken.measurement.agreement import compute_overlaps
from foretoken.measurement.estimate import MIN_CELL_COUNT, chi_square_tail
from foretoken.models.base import Model
from foretoken.request import require_uninterrupted
from foretoken.sampling.params import SamplingParams
from foretoken.speculator import Speculator
from reproduction.experiments.experiment import (
    Case,
    Columns,
    Experiment,
    Found,
    Plot,
    ResultRow,
    Section,
    done,
    rounded,
    tabulated,
)
from reproduction.pairs import Pairs
from reproduction.recipe import Recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Text = tuple[int, ...]
SAMPLED = SamplingParams(1.0)
SHOWN = 10  # images of each kind
RARE, REST = 0.01, -1  # beginnings that are no more probable; what stands for all those behind one
TESTED = 1000  # images of each prompt whose first rows are counted
LENIENT = 0.1  # the control accepts draft tokens up to ten times too often
ODDS = 0.001  # an exact method fails its test with these odds, by chance
KINDS = {"exact": 1.0, "lenient": LENIENT}  # by lenience


def cases(recipe: Recipe) -> list[Case]:
    """Every draft, at temperature 1: images are sampled."""
    if recipe.task != "image":
        return []
    return [{"draft": draft.label, "temperature": 1.0} for draft in recipe.drafts]


def measure(pairs: Pairs, case: Case) -> dict[str, Any]:
    """alpha at every pixel of images that the target made, images with and without draft tokens,
    and tests of the first row's pixels."""
    spec, recipe = pairs.spec(case["draft"]), pairs.recipe
    texts = pairs.texts(case["temperature"])
    betas = [
        compute_overlaps(spec.target, spec.drafter, one.request, one.tokens, SAMPLED)
        for one in texts
    ]
    whole = [one for one in betas if len(one) == recipe.max_new_tokens]
    if not whole:
        raise InputError("no image of the target's is whole: its texts end before")
    gamma, side = max(recipe.gammas), isqrt(recipe.max_new_tokens)
    shown = {
        name: _images(spec, pairs.prompts, SHOWN, recipe.max_new_tokens, recipe.seed, gamma=g)
        for name, g in (("plain", 0), ("speculative", gamma))
    }
    exact = [beginnings(spec.target, prompt, side) for prompt in pairs.prompts]
    tests: dict[str, Any] = {}
    for number, (kind, lenience) in enumerate(KINDS.items(), 1):
        how = {"gamma": gamma, "lenience": lenience}
        count = min(TESTED * len(exact), recipe.tokens)
        images = _images(spec, pairs.prompts, count, side, recipe.seed + number, **how)
        tests[kind] = compared(exact, images)
    alphas = [fmean(beta or 0.0 for beta in place) for place in zip(*whole, strict=True)]
    return {"alphas": alphas, "images": len(whole), "gamma": gamma, **shown, "tests": tests}


def _images(
    spec: Speculator, prompts: list[Prompt], count: int, length: int, seed: int, **how: Any
) -> list[list[int]]:
    """So many images, or their first `length` pixels: image k is of prompt k modulo their
    number."""
    asked = [prompts[k % len(prompts)] for k in range(count)]
    params = SamplingParams(1.0, max_new_tokens=length)
    return [
        one.tokens for one in require_uninterrupted(spec.generate(asked, params, seed=seed, **how))
    ]


@torch.inference_mode()
def beginnings(target: Model, prompt: Prompt, length: int) -> dict[Text, float]:
    """Return the probabilities of the target's texts of `length` tokens, those that are rare under
    their last beginning that is not, and REST: they sum to 1."""
    ids = [int(i) for i in prompt]
    cells: dict[Text, float] = {}
    open_: dict[Text, float] = {(): 1.0}
    for _ in range(length):
        if not open_:
            break
        longer: dict[Text, float] = {}
        for (head, mass), p in zip(open_.items(), _next(target, ids, list(open_)), strict=True):
            masses = {(*head, token): mass * share for token, share in enumerate(p)}
            longer |= {text: each for text, each in masses.items() if each > RARE}
            cells[*head, REST] = sum(each for each in masses.values() if each <= RARE)
        open_ = longer
    return cells | open_


def _next(target: Model, prompt: list[int], heads: list[Text]) -> list[list[float]]:
    """Return the distributions of the next token behind the prompt and each of these, as many
    tokens long as one another."""
    with hold_lease(target):
        target.start([prompt[:-1]] * len(heads))
        blocks = [[prompt[-1], *head] for head in heads]
        logits = target.score(blocks, [len(block) for block in blocks])
    return logits[:, -1].double().softmax(-1).tolist()


def compared(exact: Sequence[Mapping[Text, float]], images: Iterable[list[int]]) -> dict[str, Any]:
    """Pearson's chi-square of images, image k of distribution k modulo their number, against the
    probabilities of their beginnings."""
    counts: list[Counter[Text]] = [Counter() for _ in exact]
    for k, image in enumerate(images):
        place = k % len(exact)
        heads = ((*image[:n], REST) for n in reversed(range(len(image))))
        cell = next(head for head in (tuple(image), *heads) if head in exact[place])
        counts[place][cell] += 1
    statistic, dof, n = 0.0, 0, 0
    for probabilities, counted in zip(exact, counts, strict=True):
        total = counted.total()
        cells = sorted((total * p, counted[head]) for head, p in probabilities.items())
        few = (0.0, 0)  # in those of few images, together
        while cells and min(few[0], cells[0][0]) < MIN_CELL_COUNT:
            expected, found = cells.pop(0)
            few = few[0] + expected, few[1] + found
        cells += [few] * (few[0] > 0)
        statistic += sum((found - expected) ** 2 / expected for expected, found in cells)
        dof, n = dof + len(cells) - 1, n + total
    p_value = chi_square_tail(statistic, dof) if dof else 1.0
    return {"images": n, "cells": dof + len(exact), "statistic": statistic, "p_value": p_value}


def section(recipe: Recipe, results: Found) -> Section | None:
    """The pictures, and the tests."""
    rows = done(results, "pixels")
    if not rows:
        return None
    tests = [(row, kind) for row in rows for kind in KINDS]
    columns: Columns[tuple[ResultRow, str]] = {
        "draft": lambda one: one[0].draft,
        "lenience": lambda one: f"{KINDS[one[1]]:g}",
        "images": lambda one: f"{_test(one)['images']:,}",
        "cells": lambda one: f"{_test(one)['cells']:,}",
        "chi-square": lambda one: rounded(_test(one)["statistic"], 1),
        "p": lambda one: f"{_test(one)['p_value']:.2g}",
    }
    caption = "Pixels of the first row against their enumerated distribution"
    side = isqrt(recipe.max_new_tokens)
    return Section(
        "The paper's discussion: images",
        _said(rows, side),
        [tabulated(caption, tests, columns)],
        [
            Plot("pixels", "alpha at every pixel", partial(_draw_alphas, rows, side), (7.5, 2.6)),
            Plot(
                "images",
                "Images without draft tokens, above, and with those of each draft",
                partial(_draw_images, rows, side),
                (7.5, 0.75 * (len(rows) + 1)),
            ),
        ],
    )


EXPERIMENT = Experiment(section, cases, measure)


def _test(one: tuple[ResultRow, str]) -> dict[str, Any]:
    row, kind = one
    return row.result["tests"][kind]


def _said(rows: list[ResultRow], side: int) -> list[str]:
    exact, lenient = ([_test((row, kind))["p_value"] for row in rows] for kind in KINDS)
    held, caught = sum(p >= ODDS for p in exact), sum(p < ODDS for p in lenient)
    alphas = [
        f"{row.draft} {fmean(row.result['alphas']):.2f} (pixels: {min(row.result['alphas']):.2f} "
        f"to {max(row.result['alphas']):.2f})"
        for row in rows
    ]
    return [
        f"An image is {side} times {side} tokens, row by row, sampled at T=1. alpha: "
        f"{', '.join(alphas)}. It is high where nearly every image has the same pixel, and low "
        "where strokes may or may not be.",
        f"The first row's distribution, given what the image begins with, is enumerated from the "
        f"target (beginnings of {RARE:.0%} or less together), and images with "
        f"draft tokens, gamma {rows[0].result['gamma']}, are counted: {held} of {len(rows)} drafts "
        f"pass. An exact method fails with odds of {ODDS:g} for each draft, by chance. The "
        f"control, which accepts draft tokens up to {1 / LENIENT:g} times too often (lenience "
        f"{LENIENT:g}), is caught in {caught} of {len(rows)}.",
    ]


def _draw_alphas(rows: list[ResultRow], side: int, figure: Figure) -> None:
    """A picture for each draft, on one scale."""
    all_axes = figure.subplots(1, len(rows), squeeze=False)[0]
    image = None
    for axes, row in zip(all_axes, rows, strict=True):
        alphas = np.array(row.result["alphas"]).reshape(side, side)
        image = axes.imshow(alphas, vmin=0, vmax=1, cmap="viridis")
        axes.set_title(f"{row.draft}: {alphas.mean():.2f}")
        axes.set_xticks([])
        axes.set_yticks([])
    assert image is not None
    figure.colorbar(image, ax=list(all_axes), label="alpha")


def _draw_images(rows: list[ResultRow], side: int, figure: Figure) -> None:
    """Plain ones above, a line for each draft below."""
    lines = {"plain": rows[0].result["plain"]}
    lines |= {row.draft: row.result["speculative"] for row in rows}
    all_axes = figure.subplots(len(lines), 1, squeeze=False)[:, 0]
    brightest = max(max(image) for images in lines.values() for image in images)
    for axes, (name, images) in zip(all_axes, lines.items(), strict=True):
        strip = np.full((side, len(images) * (side + 1) - 1), math.nan)
        for k, image in enumerate(images):
            pixels = np.array([*image, *[math.nan] * (side * side - len(image))], dtype=float)
            strip[:, k * (side + 1) : k * (side + 1) + side] = pixels.reshape(side, side)
        axes.imshow(strip, vmin=0, vmax=brightest, cmap="gray")
        axes.set_ylabel(name, rotation=0, ha="right", va="center")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
