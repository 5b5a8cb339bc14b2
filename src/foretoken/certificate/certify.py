"""The certificate of a pair of target and draft: all tests, and the verdict from their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, Literal

from pydantic_core import to_json

from foretoken.certificate.greedy_identity import (
    Difference,
    ShapeNoise,
    find_first_difference,
    group_rows,
    measure_shape_noise,
)
from foretoken.certificate.planted_bugs import ArgmaxDrafter, OffByOneModel, break_rule
from foretoken.certificate.sampled_trial import (
    PLAIN_RULE,
    SampledTrial,
    Track,
    run_plain_tests,
    run_target_tests,
)
from foretoken.certificate.watched_drafter import DraftLog, WatchedDrafter, run_draft_token_tests
from foretoken.drafters.base import Drafter
from foretoken.errors import InputError, is_whole_number
from foretoken.inputs import Prompt, make_keys, resolve_verifier, to_prompt_list
from foretoken.measurement.estimate import TEST_POWER, HypothesisTest
from foretoken.request import Request, require_uninterrupted
from foretoken.sampling.acceptance_rules import Rule, block
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.verifier import RULES_BY_NAME
from foretoken.speculator import MAX_BATCH_SIZE, Speculator

FALSE_ALARM_PROBABILITY = 1e-4  # probability that an exact pair fails any of its tests
DEFAULT_DISTRIBUTIONS = (SamplingParams(1.0), SamplingParams(1.0, top_k=20))
MAX_SAMPLED_PROMPTS = 8  # for sampled outputs; greedy outputs are compared for all prompts


def choose_distributions(own: SamplingParams) -> Sequence[SamplingParams]:
    """Return the sampling params to certify: temperature 1, which shows bugs best, and the user's
    params `own`. If `own` is the greedy default, return `DEFAULT_DISTRIBUTIONS`. Raises InputError
    for other greedy params."""
    if own == SamplingParams(0.0):
        return DEFAULT_DISTRIBUTIONS
    if own.greedy:
        raise InputError(
            f"temperature is {own.temperature:g}: top-k, top-p and min-p do not change greedy "
            "output; also give a temperature above 0"
        )
    return (DEFAULT_DISTRIBUTIONS[0], own) if own != DEFAULT_DISTRIBUTIONS[0] else (own,)


@dataclass(frozen=True, slots=True)
class CertificatePlan:
    """Options of a certificate."""

    gamma: int = 3
    rule: str | Rule = "block"
    # outputs with draft tokens for each prompt and distribution; as many plain outputs
    num_samples: int = 192
    num_greedy_tokens: int = 48  # new tokens of a greedy output
    seed: int = 0
    distributions: Sequence[SamplingParams] = DEFAULT_DISTRIBUTIONS  # sampling params to test

    def __post_init__(self) -> None:
        if not self.distributions:
            raise InputError("distributions is empty; give one or more SamplingParams")
        for distribution in self.distributions:
            if distribution.greedy:
                raise InputError(
                    f"temperature is {distribution.temperature} in one of distributions; give a "
                    "temperature above 0, as greedy outputs are compared in any case"
                )
        resolve_verifier(self.gamma, self.rule, lenience=1.0)
        make_keys(self.seed, [1])
        SamplingParams(max_new_tokens=self.num_greedy_tokens)
        if not self.gamma or self.gamma < 1:
            raise InputError(f"gamma is {self.gamma}; give 1 or more to certify a draft")
        if not is_whole_number(self.num_samples):
            raise InputError(f"num_samples is {self.num_samples!r:.60}; give a whole number")
        if self.num_samples < 16:
            raise InputError(f"num_samples is {self.num_samples}; the tests need 16 or more")

    @property
    def num_new_tokens(self) -> int:
        """New tokens of a sampled output: the first token, and the tokens of two full steps."""
        return 1 + 2 * (self.gamma + 1)  # some drafters draft nothing for the first token


@dataclass(frozen=True, slots=True)
class PlantedBug:
    """A planted bug, and whether it was found."""

    name: str
    found: bool
    p_value: float | None = None  # lowest p-value of the tests for this bug; None without tests


@dataclass(frozen=True, slots=True)
class Certificate:
    """The results of all tests of a pair. A hypothesis test fails if its p-value is below
    `level`."""

    prompts: int
    level: float
    shapes: ShapeNoise
    greedy_tokens: int  # number of tokens compared with plain decoding
    differences: list[Difference]  # between greedy outputs
    tests: list[HypothesisTest]
    guesses: int  # draft tokens
    certain: int  # draft tokens that were reported without a q
    lies: list[str]  # descriptions of draft tokens that were not sampled from the reported q
    controls: list[PlantedBug]  # the certificate is void if one of these was not found

    @property
    def odds(self) -> str:
        """The probability that the certificate of an exact pair fails, in words."""
        return f"an exact pair would fail one certificate in {1 / FALSE_ALARM_PROBABILITY:,.0f}"

    @property
    def legend(self) -> str:
        """The meaning of a test's `catches`, in words."""
        finds = f"that a test finds with probability {TEST_POWER:.0%}"
        return f"catches: the smallest total variation distance {finds}"

    def to_json(self, **pair: Any) -> str:
        """Return the verdict, the description `pair` of the pair, and all results as JSON. Infinity
        becomes null."""
        document = {"verdict": self.verdict, **pair, **asdict(self)}
        return to_json(document, inf_nan_mode="null").decode()

    @property
    def failed(self) -> list[HypothesisTest]:
        return [test for test in self.tests if test.p_value < self.level]

    @property
    def bugs(self) -> list[Difference]:
        """Differences between greedy outputs that rounding does not explain."""
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
    """Test whether the output of `spec` has the target's distribution. The tests cover greedy
    outputs, sampled outputs, draft tokens and logits of blocks; planted bugs show that the tests
    find bugs.

    The models must be idle. track: called with the numbers of a test's runs and the name of the
    test; returns an iterable over the same numbers, which may display progress. Raises InputError
    if the pair cannot be certified or the models cannot continue the prompts; KeyboardInterrupt if
    the certificate is interrupted.
    """
    plan = plan or CertificatePlan()
    prompts = to_prompt_list(prompts)
    if not spec.costing.drafts:
        raise InputError("draft is none, which is plain decoding; give a draft to certify")
    if not prompts:
        raise InputError("prompts is empty; give one or more prompts")
    spec.drafter.with_target(OffByOneModel(spec.target))  # raise now rather than after minutes
    all_pair, sampled_pair = (
        _Pair(spec, prompts, plan, track),
        _Pair(spec, prompts[:MAX_SAMPLED_PROMPTS], plan, track),
    )
    all_pair.make_requests()  # raise now if a prompt is invalid
    plain = all_pair.generate_plain()
    shapes = all_pair.measure_shapes(plain)
    tokens, differences = all_pair.compare_greedy(plain, shapes)
    tests, log = sampled_pair.run_sampled_tests()
    controls = [
        *sampled_pair.plant_wrong_model(plain[:MAX_SAMPLED_PROMPTS], shapes),
        sampled_pair.plant_wrong_rule(),
    ]
    if log.uniforms:  # some draft tokens had a q
        controls.append(sampled_pair.plant_wrong_draft_tokens())
    return Certificate(
        prompts=len(prompts),
        level=sampled_pair.level,
        shapes=shapes,
        greedy_tokens=tokens,
        differences=differences,
        tests=tests,
        guesses=log.num_draft_tokens,
        certain=log.num_certain,
        lies=log.lies,
        controls=controls,
    )


@dataclass(frozen=True, slots=True)
class _Pair:
    """A pair of target and draft, and the prompts to test it on."""

    spec: Speculator
    prompts: list[Prompt]
    plan: CertificatePlan
    track: Track

    @property
    def level(self) -> float:
        """The significance level of each test. The probability that an exact pair fails one test or
        more is at most `FALSE_ALARM_PROBABILITY`."""
        return FALSE_ALARM_PROBABILITY / (len(self.plan.distributions) * (len(self.prompts) + 7))

    def make_requests(self) -> list[Request]:
        greedy = SamplingParams(max_new_tokens=self.plan.num_greedy_tokens)
        return self.spec.inputs.make_requests(self.prompts, greedy, self.plan.seed)

    def generate_plain(self) -> list[list[int]]:
        """Return the outputs of plain greedy decoding, one sequence at a time."""
        numbers = self.track(range(len(self.prompts)), "greedy: plain")
        return [self._generate([i], gamma=0)[0] for i in numbers]

    def _generate(self, prompt_indices: list[int], gamma: int) -> list[list[int]]:
        completions = self.spec.generate(
            [self.prompts[i] for i in prompt_indices],
            max_new_tokens=self.plan.num_greedy_tokens,
            gamma=gamma,
            rule=self.plan.rule if gamma else PLAIN_RULE,
        )
        return [each.tokens for each in require_uninterrupted(completions)]

    def measure_shapes(self, plain: list[list[int]]) -> ShapeNoise:
        """Compare the logits of blocks of the plain outputs with the logits of single tokens."""
        width = self.plan.gamma + 1
        return measure_shape_noise(
            self.spec.target, self.make_requests()[:MAX_BATCH_SIZE], plain[:MAX_BATCH_SIZE], width
        )

    def compare_greedy(
        self, plain: list[list[int]], shapes: ShapeNoise
    ) -> tuple[int, list[Difference]]:
        """Generate greedy outputs with gamma 1 and with the plan's gamma. Compare these outputs
        with the plain outputs. Return the number of compared tokens, and the first difference of
        each output that differs."""
        requests, tokens, found = self.make_requests(), 0, list[Difference]()
        for gamma, rows in product(sorted({1, self.plan.gamma}), group_rows(len(requests))):
            for i, output in zip(rows, self._generate(rows, gamma), strict=True):
                difference = find_first_difference(
                    self.spec.target, requests[i], plain[i], output, shapes, (i, gamma)
                )
                tokens += len(plain[i])
                found += [] if difference is None else [difference]
        return tokens, found

    def _make_trial(self, params: SamplingParams, drafter: Drafter) -> SampledTrial:
        plan, spec = self.plan, replace(self.spec, drafter=drafter)
        settings = plan.gamma, plan.rule, plan.num_samples, plan.num_new_tokens, plan.seed
        return SampledTrial(spec, self.prompts, params, *settings, self.track)

    def run_sampled_tests(self) -> tuple[list[HypothesisTest], DraftLog]:
        """Run the tests of sampled outputs for each of the plan's distributions. Return the tests
        and the log of the draft tokens."""
        drafter, tests = self.spec.drafter, list[HypothesisTest]()
        watched = WatchedDrafter(drafter, self.plan.seed)
        for params in self.plan.distributions:
            trial, first = self._make_trial(params, watched), len(watched.log.uniforms)
            own_tests, samples = run_target_tests(trial, drafter, self.level)
            tests += [
                *own_tests,
                *run_draft_token_tests(trial.name, watched.log.uniforms[first:], self.level),
            ]
            tests += run_plain_tests(replace(trial, spec=self.spec), samples, self.level)
        return tests, watched.log

    def plant_wrong_model(self, plain: list[list[int]], shapes: ShapeNoise) -> Iterable[PlantedBug]:
        """Plant a bug in the target: each position has the logits of the position before. Yield
        whether the tests of forward passes, and of greedy outputs, find the bug."""
        target = OffByOneModel(self.spec.target)
        spec = replace(self.spec, target=target, drafter=self.spec.drafter.with_target(target))
        broken, name = replace(self, spec=spec), "block logits one position off"
        yield PlantedBug(f"{name}: forward passes", not broken.measure_shapes(plain).ok)
        _, found = broken.compare_greedy(plain, shapes)
        yield PlantedBug(f"{name}: greedy output", any(each.verdict == "bug" for each in found))

    def plant_wrong_rule(self) -> PlantedBug:
        """Plant a bug in the rule: the next token is drawn at the wrong position. Return whether
        the tests of sampled outputs find the bug."""
        drafter, rule = self.spec.drafter, self.plan.rule
        # "coupled" has no rule function; the bug is planted in block verification instead
        broken = break_rule(RULES_BY_NAME.get(rule, block) if isinstance(rule, str) else rule)
        trial = self._make_trial(self.plan.distributions[0], drafter)
        trial = replace(trial, rule=broken, label="planted bug", stream=3)

        def tests(num_samples: int) -> list[HypothesisTest]:
            return run_target_tests(replace(trial, num_samples=num_samples), drafter, self.level)[0]

        return self._find_bug("next token from the wrong position: sampled output", tests)

    def plant_wrong_draft_tokens(self) -> PlantedBug:
        """Plant a bug in the drafter: its draft tokens are the most probable tokens, but are
        reported as sampled. Return whether the tests of draft tokens find the bug."""

        def tests(num_samples: int) -> list[HypothesisTest]:
            watched = WatchedDrafter(ArgmaxDrafter(self.spec.drafter), self.plan.seed)
            trial = self._make_trial(self.plan.distributions[0], watched)
            for _ in replace(
                trial, num_samples=num_samples, label="planted bug", stream=4
            ).generate_batches():
                pass
            return run_draft_token_tests("", watched.log.uniforms, self.level)

        return self._find_bug("argmax reported as sampled from q: draft tokens", tests)

    def _find_bug(self, name: str, run_tests: Callable[[int], list[HypothesisTest]]) -> PlantedBug:
        """Run the tests of a planted bug on a quarter of the samples. If the tests miss the bug,
        run the tests on all samples. Return whether the tests found the bug."""
        min_p_value = 1.0
        for num_samples in (max(16, self.plan.num_samples // 4), self.plan.num_samples):
            if min_p_value >= self.level:
                min_p_value = min((test.p_value for test in run_tests(num_samples)), default=1.0)
        return PlantedBug(name, min_p_value < self.level, min_p_value)
