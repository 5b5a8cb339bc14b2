"""A certificate of a pair: all its tests, and how they are judged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, Literal

from pydantic_core import to_json

from foretoken.certificate.identity import (
    Difference,
    ShapeNoise,
    compare,
    first_difference,
    row_groups,
)
from foretoken.certificate.planted import Likeliest, OffByOne, next_row
from foretoken.certificate.sampled import (
    PLAIN,
    SampledTrial,
    Track,
    against_plain,
    against_the_distribution,
)
from foretoken.certificate.watched import Log, Watched, draft_tests
from foretoken.drafters.base import Drafter
from foretoken.errors import InputError, whole
from foretoken.inputs import Prompt, as_list, check, keys_of
from foretoken.measurement.estimate import POWER, Test
from foretoken.request import Request, uninterrupted
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.verifier import NAMED
from foretoken.sampling.verify import Rule, block
from foretoken.speculator import MAX_ROWS, Speculator

FALSE_ALARM = 1e-4  # for the whole certificate of an exact pair
DISTRIBUTIONS = (SamplingParams(1.0), SamplingParams(1.0, top_k=20))
SAMPLED = 8  # prompts that are sampled from; greedy text is compared on all


def distributions(own: SamplingParams) -> Sequence[SamplingParams]:
    """Return the distributions to certify for a user of `own`: it, and temperature 1, where bugs
    show best. For greedy generation DISTRIBUTIONS."""
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
            if distribution.greedy:
                raise InputError(
                    f"temperature is {distribution.temperature} in one of distributions; give "
                    "more, greedy text is compared anyway"
                )
        check(self.gamma, self.rule, lenience=1.0)
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


@dataclass(frozen=True, slots=True)
class Control:
    """A planted bug, and whether it was found."""

    name: str
    found: bool
    p_value: float | None = None  # the least one of the tests, where tests look for it


@dataclass(frozen=True, slots=True)
class Certificate:
    """All results. A test fails where its p-value is below `level`."""

    prompts: int
    level: float
    shapes: ShapeNoise
    greedy_tokens: int  # compared with plain ones
    differences: list[Difference]  # between greedy texts
    tests: list[Test]
    guesses: int
    certain: int  # of them: reported without a q
    lies: list[str]  # draft tokens that do not follow the q reported
    controls: list[Control]

    @property
    def odds(self) -> str:
        """Describe how seldom the certificate of an exact pair fails."""
        return f"an exact pair would fail one certificate in {1 / FALSE_ALARM:,.0f}"

    @property
    def legend(self) -> str:
        """Describe what a test catches."""
        finds = f"that a test finds with a chance of {POWER:.0%}"
        return f"catches: the least total variation {finds}"

    def to_json(self, **pair: Any) -> str:
        """Return the verdict, facts about the pair and all results as JSON, null for infinity."""
        document = {"verdict": self.verdict, **pair, **asdict(self)}
        return to_json(document, inf_nan_mode="null").decode()

    @property
    def failed(self) -> list[Test]:
        return [test for test in self.tests if test.p_value < self.level]

    @property
    def bugs(self) -> list[Difference]:
        """Differences between greedy texts that rounding does not explain."""
        return [each for each in self.differences if each.verdict == "bug"]

    @property
    def verdict(self) -> Literal["lossless", "not lossless", "void"]:
        if self.failed or self.bugs or self.lies or not self.shapes.ok:
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
    if not spec.costing.drafts:
        raise InputError("draft is none; give one that guesses: without guesses nothing can differ")
    if not prompts:
        raise InputError("there is no prompt; give one or more")
    spec.drafter.reading(OffByOne(spec.target))  # refused now, not after minutes
    every, few = _Pair(spec, prompts, plan, track), _Pair(spec, prompts[:SAMPLED], plan, track)
    every.requests()  # the same
    plain = every.plain_texts()
    shapes = every.shapes(plain)
    tokens, differences = every.differences(plain, shapes)
    tests, log = few.sampled()
    controls = [*few.wrong_model(plain[:SAMPLED], shapes), few.wrong_rule()]
    if log.uniforms:  # some draft tokens had a q
        controls.append(few.wrong_draft_tokens())
    return Certificate(
        prompts=len(prompts),
        level=few.level,
        shapes=shapes,
        greedy_tokens=tokens,
        differences=differences,
        tests=tests,
        guesses=log.guesses,
        certain=log.certain,
        lies=log.lies,
        controls=controls,
    )


@dataclass(frozen=True, slots=True)
class _Pair:
    """A pair, and the prompts on which its parts are tested."""

    spec: Speculator
    prompts: list[Prompt]
    plan: CertificatePlan
    track: Track

    @property
    def level(self) -> float:
        """The level of each test, so that all of them fail an exact pair with FALSE_ALARM."""
        return FALSE_ALARM / (len(self.plan.distributions) * (len(self.prompts) + 7))

    def requests(self) -> list[Request]:
        greedy = SamplingParams(max_new_tokens=self.plan.greedy)
        return self.spec.inputs.requests(self.prompts, greedy, self.plan.seed)

    def plain_texts(self) -> list[list[int]]:
        """Return the plain greedy texts, made one row at a time."""
        numbers = self.track(range(len(self.prompts)), "greedy: plain")
        return [self._texts([i], gamma=0)[0] for i in numbers]

    def _texts(self, rows: list[int], gamma: int) -> list[list[int]]:
        made = self.spec.generate(
            [self.prompts[row] for row in rows],
            max_new_tokens=self.plan.greedy,
            gamma=gamma,
            rule=self.plan.rule if gamma else PLAIN,
        )
        return [row.tokens for row in uninterrupted(made)]

    def shapes(self, plain: list[list[int]]) -> ShapeNoise:
        """Compare passes over blocks along the plain texts with single tokens."""
        width = self.plan.gamma + 1
        return compare(self.spec.target, self.requests()[:MAX_ROWS], plain[:MAX_ROWS], width)

    def differences(
        self, plain: list[list[int]], shapes: ShapeNoise
    ) -> tuple[int, list[Difference]]:
        """Compare greedy texts with draft tokens, at gamma 1 and the plan's, with plain ones: the
        tokens compared, and the first difference of each text that has one."""
        requests, tokens, found = self.requests(), 0, list[Difference]()
        for gamma, rows in product(sorted({1, self.plan.gamma}), row_groups(len(requests))):
            for i, text in zip(rows, self._texts(rows, gamma), strict=True):
                difference = first_difference(
                    self.spec.target, requests[i], plain[i], text, shapes, (i, gamma)
                )
                tokens += len(plain[i])
                found += [] if difference is None else [difference]
        return tokens, found

    def _trial(self, params: SamplingParams, drafter: Drafter) -> SampledTrial:
        plan, spec = self.plan, replace(self.spec, drafter=drafter)
        settings = plan.gamma, plan.rule, plan.texts, plan.length, plan.seed
        return SampledTrial(spec, self.prompts, params, *settings, self.track)

    def sampled(self) -> tuple[list[Test], Log]:
        """Return all tests of sampled text, distribution by distribution, and what the drafter did
        meanwhile."""
        drafter, tests = self.spec.drafter, list[Test]()
        watched = Watched(drafter, self.plan.seed)
        for params in self.plan.distributions:
            trial, first = self._trial(params, watched), len(watched.log.uniforms)
            own, texts = against_the_distribution(trial, drafter, self.level)
            tests += [*own, *draft_tests(trial.name, watched.log.uniforms[first:], self.level)]
            tests += against_plain(replace(trial, spec=self.spec), texts, self.level)
        return tests, watched.log

    def wrong_model(self, plain: list[list[int]], shapes: ShapeNoise) -> Iterable[Control]:
        """Look for logits of the place before, in passes and in greedy text."""
        target = OffByOne(self.spec.target)
        spec = replace(self.spec, target=target, drafter=self.spec.drafter.reading(target))
        broken, name = replace(self, spec=spec), "block logits one place off"
        yield Control(f"{name}: passes", not broken.shapes(plain).ok)
        _, found = broken.differences(plain, shapes)
        yield Control(f"{name}: greedy text", any(each.verdict == "bug" for each in found))

    def wrong_rule(self) -> Control:
        """Look for replacements from the wrong position, in sampled text."""
        drafter, rule = self.spec.drafter, self.plan.rule
        # A named mode that has no verification rule: the bug is planted in block verification
        broken = next_row(NAMED.get(rule, block) if isinstance(rule, str) else rule)
        trial = self._trial(self.plan.distributions[0], drafter)
        trial = replace(trial, rule=broken, label="planted bug", stream=3)

        def tests(texts: int) -> list[Test]:
            return against_the_distribution(replace(trial, texts=texts), drafter, self.level)[0]

        return self._control("replacement from the wrong position: sampled text", tests)

    def wrong_draft_tokens(self) -> Control:
        """Look for the likeliest tokens, reported as drawn."""

        def tests(texts: int) -> list[Test]:
            watched = Watched(Likeliest(self.spec.drafter), self.plan.seed)
            trial = self._trial(self.plan.distributions[0], watched)
            for _ in replace(trial, texts=texts, label="planted bug", stream=4).batches():
                pass
            return draft_tests("", watched.log.uniforms, self.level)

        return self._control("likeliest guesses with a dense q: guesses", tests)

    def _control(self, name: str, tests: Callable[[int], list[Test]]) -> Control:
        """Look for a bug in a quarter of the texts, or in all where these do not show it."""
        least = 1.0
        for texts in (max(16, self.plan.texts // 4), self.plan.texts):
            if least >= self.level:
                least = min((test.p_value for test in tests(texts)), default=1.0)
        return Control(name, least < self.level, least)
