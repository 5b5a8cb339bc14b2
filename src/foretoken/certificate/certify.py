"""A certificate of a pair: all its tests, how they are judged, and how long they take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor

from foretoken.certificate.identity import (
    Identity,
    ShapeNoise,
    compare,
    first_difference,
    row_groups,
)
from foretoken.certificate.sampled import (
    Log,
    SampledTrial,
    Track,
    Watched,
    against_plain,
    against_the_distribution,
    completions,
)
from foretoken.drafters.base import Draft, Drafter, DrafterBase
from foretoken.drafters.none import NoDrafter
from foretoken.errors import InputError, whole
from foretoken.measurement.estimate import Test, Uniforms, binned
from foretoken.models.base import Blocks, Model
from foretoken.options import Prompt, as_list, check, keys_of
from foretoken.request import uninterrupted
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.draw import Draw
from foretoken.sampling.verifier import NAMED
from foretoken.sampling.verify import Outcome, Rule, block
from foretoken.speculator import BATCH, Speculator


@dataclass(frozen=True, slots=True)
class Control:
    """A planted bug, and whether it was found."""

    name: str
    found: bool
    p_value: float | None = None  # the least one of the tests, where tests look for it


class NextRow(Outcome):
    """The next token comes from the distribution one position too far on, behind a draft token not
    kept."""

    def next_distribution(self, n: Tensor) -> Tensor:
        rows = torch.arange(len(n), device=n.device)
        return self.p[rows, (n + 1) % (self.lengths + 1)]


def next_row(rule: Rule) -> Rule:
    """`rule`, with replacements from the wrong position."""

    def broken(p: Tensor, q: Tensor | None, x: Tensor, lengths: Tensor) -> Outcome:
        o = rule(p, q, x, lengths)
        return NextRow(o.survival, o.p, o.q, o.x, o.lengths, o.scale)

    return broken


class Likeliest(DrafterBase):
    """A Drafter whose draft tokens are its likeliest tokens, reported as drawn from q."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.holds = drafter, (drafter,)
        self.start, self.commit, self.leave = drafter.start, drafter.commit, drafter.leave

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        draft = self.drafter.propose(gamma, draw)
        return draft if draft.q is None else replace(draft, tokens=draft.q.argmax(-1))


SHOWN = ("taps", "show", "shown", "lent")  # of `models.base.LendsKeys`


class OffByOne:
    """A Model whose logits of a block are those of the place before.

    A drafter that reads the target's states must read this model's (`Drafter.reading`).
    """

    def __init__(self, model: Model) -> None:
        self.model, self.holds = model, (model,)
        self.vocab_size, self.context = model.vocab_size, model.context
        self.encoder_decoder, self.source_context = model.encoder_decoder, model.source_context
        self.source_vocab_size = model.source_vocab_size
        self.runtime, self.device = model.runtime, model.device
        self.takes_tensors, self.computed = model.takes_tensors, model.computed
        self.start, self.set_lengths = model.start, model.set_lengths
        self.permute, self.leave = model.permute, model.leave
        for name in SHOWN:  # by drafters that read more of a target than its logits
            if hasattr(model, name):
                setattr(self, name, getattr(model, name))

    @property
    def padding(self) -> int:
        return self.model.padding

    @property
    def hidden(self) -> Tensor:
        """States of the target, where it shows them."""
        return self.model.hidden  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def lengths(self) -> list[int]:
        """Tokens of every row, where the target says."""
        return self.model.lengths  # pyright: ignore[reportAttributeAccessIssue]

    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        return self.model.score(blocks, need).roll(1, 1)


FALSE_ALARM = 1e-4  # for the whole certificate of an exact pair
DISTRIBUTIONS = (SamplingParams(1.0), SamplingParams(1.0, top_k=20))
PLAIN = "speculative"  # plain decoding does not go through the rule that is certified
SAMPLED = 8  # prompts that are sampled from; greedy text is compared on all


def distributions(own: SamplingParams) -> Sequence[SamplingParams]:
    """The distributions to certify for a user of `own`: it, and temperature 1, where bugs show
    best. For greedy generation DISTRIBUTIONS."""
    if own == SamplingParams(0.0):
        return DISTRIBUTIONS
    if own.greedy:
        raise InputError(
            f"temperature is {own.temperature:g}: greedy text, in which top-k, top-p and min-p "
            "change nothing; give a temperature too"
        )
    return (DISTRIBUTIONS[0], own) if own != DISTRIBUTIONS[0] else (own,)


@dataclass(frozen=True, slots=True)
class CertificatePlan:
    """Options of a certificate."""

    gamma: int = 3
    rule: str | Rule = "block"
    texts: int = 192  # sampled for each prompt and distribution, speculatively and plainly
    greedy: int = 48  # new tokens of a greedy text
    seed: int = 0
    distributions: Sequence[SamplingParams] = DISTRIBUTIONS

    def __post_init__(self) -> None:
        if not self.distributions:
            raise InputError("distributions is empty; give one or more SamplingParams")
        for distribution in self.distributions:
            check(self.gamma, self.rule, lenience=1.0)
            if distribution.greedy:
                raise InputError(
                    f"temperature is {distribution.temperature} in one of distributions; give "
                    "more, greedy text is compared anyway"
                )
        keys_of(self.seed, [1])
        SamplingParams(max_new_tokens=self.greedy)
        if not self.gamma or self.gamma < 1:
            raise InputError(f"gamma is {self.gamma}; give 1 or more to certify a draft")
        if not whole(self.texts):
            raise InputError(f"texts is {self.texts!r:.60}; give a whole number")
        if self.texts < 16:
            raise InputError(f"texts is {self.texts}; give 16 or more, for the tests")

    @property
    def length(self) -> int:
        """New tokens of a sampled text: the first one, and two steps at least."""
        return 1 + 2 * (self.gamma + 1)  # nothing is drafted for the first token

    def trial(self, params: SamplingParams) -> SampledTrial:
        """Return the sampled trial with these params."""
        return SampledTrial(params, self.gamma, self.rule, self.texts, self.length, self.seed)


@dataclass(frozen=True, slots=True)
class Certificate:
    """All results. A test fails where its p-value is below `level`."""

    prompts: int
    level: float
    shapes: ShapeNoise
    identity: Identity
    tests: list[Test]
    guesses: int
    certain: int  # of them: reported without a q
    lies: list[str]  # draft tokens that do not follow the q reported
    controls: list[Control]

    @property
    def failed(self) -> list[Test]:
        return [test for test in self.tests if test.p_value < self.level]

    @property
    def faults(self) -> list[str]:
        """Why it is not lossless, a line each."""
        s, faults = self.shapes, []
        if not s.ok:
            faults = [
                f"logits of a block are off by {s.noise:.2g}; rounding explains {s.allowed:.2g}"
            ]
        faults += [f"{test.name}: p-value {test.p_value:.1e}" for test in self.failed]
        if bugs := self.identity.bugs:
            faults.append(f"greedy text differs {len(bugs)} times by more than rounding")
        if self.lies:
            faults.append(f"{len(self.lies)} guesses do not follow the q reported: {self.lies[0]}")
        return faults

    @property
    def verdict(self) -> Literal["lossless", "not lossless", "void"]:
        if self.faults:
            return "not lossless"
        return "lossless" if all(control.found for control in self.controls) else "void"


def certify(
    spec: Speculator,
    prompts: Prompt | Sequence[Prompt],
    plan: CertificatePlan | None = None,
    track: Track = lambda numbers, what: numbers,
) -> Certificate:
    """Test whether `spec` keeps the target's distribution: greedy text, sampled text, draft tokens,
    forwards, controls.

    The models must be idle. Raises InputError where the pair cannot be certified or the models
    cannot continue the prompts; KeyboardInterrupt where it was interrupted.
    """
    plan = plan or CertificatePlan()
    prompts = as_list(prompts)
    require(spec, prompts, plan)
    level = FALSE_ALARM / count(prompts, plan)
    shapes, identity, texts = _greedy(spec, prompts, plan, track)
    few, texts = prompts[:SAMPLED], texts[:SAMPLED]
    tests, log = _sampled(spec, few, plan, level, track)
    controls = [
        *_wrong_model(spec, few, texts, plan, shapes),
        _wrong_rule(spec, few, plan, level, track),
    ]
    if log.uniforms:  # some draft tokens had a q
        controls.append(_wrong_draft_tokens(spec, few, plan, level, track))
    return Certificate(
        prompts=len(prompts),
        level=level,
        shapes=shapes,
        identity=identity,
        tests=tests,
        guesses=log.guesses,
        certain=log.certain,
        lies=log.lies,
        controls=controls,
    )


def count(prompts: list[Prompt], plan: CertificatePlan) -> int:
    """Tests of a certificate, at most."""
    return len(plan.distributions) * (min(len(prompts), SAMPLED) + 7)


def require(spec: Speculator, prompts: list[Prompt], plan: CertificatePlan) -> None:
    """InputError where there is nothing to certify; RefusedError where it cannot be."""
    if isinstance(spec.drafter, NoDrafter):
        raise InputError("draft is none; give one that guesses: without guesses nothing can differ")
    if not prompts:
        raise InputError("there is no prompt; give one or more")
    spec.drafter.reading(OffByOne(spec.target))  # refused now, not after minutes
    spec.inputs.requests(prompts, SamplingParams(max_new_tokens=plan.greedy), plan.seed)


def _greedy(
    spec: Speculator, prompts: list[Prompt], plan: CertificatePlan, track: Track
) -> tuple[ShapeNoise, Identity, list[list[int]]]:
    """Block passes along plain greedy texts, greedy texts with draft tokens, and the plain ones,
    which are made one row at a time."""
    plain: list[list[int]] = []
    for i in track(range(len(prompts)), "greedy: plain"):
        plain += _texts(spec, [prompts[i]], plan, gamma=0)
    shapes = _shapes(spec, prompts, plain, plan)
    return shapes, _identity(spec, prompts, plain, plan, shapes), plain


def _shapes(
    spec: Speculator, prompts: list[Prompt], texts: list[list[int]], plan: CertificatePlan
) -> ShapeNoise:
    greedy = SamplingParams(max_new_tokens=plan.greedy)
    requests = spec.inputs.requests(prompts[:BATCH], greedy, plan.seed)
    return compare(spec.target, requests, texts[:BATCH], plan.gamma + 1)


def _identity(
    spec: Speculator,
    prompts: list[Prompt],
    plain: list[list[int]],
    plan: CertificatePlan,
    shapes: ShapeNoise,
) -> Identity:
    greedy = SamplingParams(max_new_tokens=plan.greedy)
    requests = spec.inputs.requests(prompts, greedy, plan.seed)
    differences, texts, tokens, same = [], 0, 0, 0
    gammas = sorted({1, plan.gamma})
    for gamma, rows in product(gammas, row_groups(len(prompts))):
        fast = _texts(spec, [prompts[i] for i in rows], plan, gamma)
        for i, text in zip(rows, fast, strict=True):
            difference = first_difference(
                spec.target, requests[i], plain[i], text, shapes, (i, gamma)
            )
            texts += 1
            tokens += len(plain[i])
            same += len(plain[i]) if difference is None else difference.place
            differences += [] if difference is None else [difference]
    return Identity(gammas, texts, tokens, same, differences)


def _texts(
    spec: Speculator, prompts: list[Prompt], plan: CertificatePlan, gamma: int
) -> list[list[int]]:
    rule = plan.rule if gamma else PLAIN
    rows = spec.generate(prompts, max_new_tokens=plan.greedy, gamma=gamma, rule=rule)
    return [row.tokens for row in uninterrupted(rows)]


def _sampled(
    spec: Speculator, prompts: list[Prompt], plan: CertificatePlan, level: float, track: Track
) -> tuple[list[Test], Log]:
    """All tests of sampled text, distribution by distribution, and what the drafter did
    meanwhile."""
    watched = Watched(spec.drafter, plan.seed)
    tests: list[Test] = []
    for params in plan.distributions:
        trial = plan.trial(params)
        first = len(watched.log.uniforms)
        own, texts = against_the_distribution(
            replace(spec, drafter=watched), spec.drafter, prompts, trial, level, track
        )
        tests += own
        tests += _drafted(trial.name, watched.log.uniforms[first:], level)
        plain = replace(trial, gamma=0, rule=PLAIN)
        tests += against_plain(spec, prompts, texts, plain, level, track)
    return tests, watched.log


def _drafted(name: str, draft_tokens: list[Uniforms], level: float) -> list[Test]:
    """Tell whether guesses follow the q reported; no test where all were certain."""
    if not draft_tokens:
        return []
    ranked = torch.cat([u.ranked for u in draft_tokens])
    by_id = torch.cat([u.by_id for u in draft_tokens])
    return [
        binned(f"{name}: guesses under q, by rank", "guesses", ranked, level),
        binned(f"{name}: guesses under q, by id", "guesses", by_id, level),
    ]


def _wrong_model(
    spec: Speculator,
    prompts: list[Prompt],
    texts: list[list[int]],
    plan: CertificatePlan,
    shapes: ShapeNoise,
) -> Iterable[Control]:
    target = OffByOne(spec.target)
    broken = replace(spec, target=target, drafter=spec.drafter.reading(target))
    name = "block logits one place off"
    yield Control(f"{name}: passes", not _shapes(broken, prompts, texts, plan).ok)
    identity = _identity(broken, prompts, texts, plan, shapes)
    yield Control(f"{name}: greedy text", not identity.ok)


def _wrong_rule(
    spec: Speculator, prompts: list[Prompt], plan: CertificatePlan, level: float, track: Track
) -> Control:
    # A named mode that has no verification rule: the bug is planted in block verification
    honest = NAMED.get(plan.rule, block) if isinstance(plan.rule, str) else plan.rule
    rule = next_row(honest)

    def least(texts: int) -> float:
        broken = replace(plan.trial(plan.distributions[0]), rule=rule, texts=texts)
        tests, _ = against_the_distribution(
            spec, spec.drafter, prompts, broken, level, track, "control", stream=3
        )
        return _least(tests)

    return _control("replacement from the wrong position: sampled text", least, plan, level)


def _wrong_draft_tokens(
    spec: Speculator, prompts: list[Prompt], plan: CertificatePlan, level: float, track: Track
) -> Control:
    def least(texts: int) -> float:
        watched = Watched(Likeliest(spec.drafter), plan.seed)
        trial = replace(plan.trial(plan.distributions[0]), texts=texts)
        for _ in completions(replace(spec, drafter=watched), prompts, trial, 4, track, "control"):
            pass
        return _least(_drafted("", watched.log.uniforms, level))

    return _control("likeliest guesses with a dense q: guesses", least, plan, level)


def _control(
    name: str, least: Callable[[int], float], plan: CertificatePlan, level: float
) -> Control:
    """`least(texts)` is the least p-value of so many texts: a quarter of them, or all where these
    do not show the bug."""
    p_value = least(max(16, plan.texts // 4))
    p_value = p_value if p_value < level else least(plan.texts)
    return Control(name, p_value < level, p_value)


def _least(tests: list[Test]) -> float:
    return min((test.p_value for test in tests), default=1.0)


STREAM = 5  # of random numbers: that of no part
# texts with guesses for the planted bugs, of a distribution's: a quarter, half of them twice
CONTROLS = 0.4
GREEDY = 6  # lone greedy texts a prompt: plain, with draft tokens, for the controls, and along them


def expected(spec: Speculator, prompts: list[Prompt], plan: CertificatePlan) -> float:
    """About the seconds that `certify` takes, from a hundredth of its work. Raises as it does."""
    require(spec, prompts, plan)
    few = prompts[:SAMPLED]
    trial = replace(plan.trial(plan.distributions[0]), texts=-(-BATCH // len(few)))
    plain = replace(trial, gamma=0, rule=PLAIN)
    drafted_seconds = _seconds(
        lambda: against_the_distribution(
            spec, spec.drafter, few, trial, 0.5, lambda numbers, what: numbers, stream=STREAM
        )
    )
    plain_seconds = _seconds(
        lambda: list(completions(spec, few, plain, STREAM, lambda numbers, what: numbers, ""))
    )
    token_seconds = (
        _seconds(
            lambda: spec.generate(
                prompts[:1], max_new_tokens=plan.length, gamma=0, rule=PLAIN, ignore_eos=True
            )
        )
        / plan.length
    )
    texts = plan.texts / trial.texts
    sampled = texts * len(plan.distributions) * (drafted_seconds + 2 * plain_seconds)
    controls = texts * CONTROLS * drafted_seconds
    return sampled + controls + GREEDY * len(prompts) * plan.greedy * token_seconds


def _seconds(work: Callable[[], object]) -> float:
    """Time the second run of `work`: the first one is slower."""
    work()
    start = perf_counter()
    work()
    return perf_counter() - start
