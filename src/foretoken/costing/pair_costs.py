"""Step costs of one pair in one process: measured or read from disk when first needed, then frozen.

Does not depend on callers' texts. Real steps are compared with the costs, so that a later process
measures wrong ones again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from foretoken.costing import costs, stored_costs
from foretoken.costing.costs import Costs
from foretoken.costing.gamma import (
    AdaptiveGamma,
    FixedGamma,
    ForcedTokensOnly,
    GammaPolicy,
    costs_at_length,
)
from foretoken.costing.probe import PROBE_TOKENS, probe, probe_shared
from foretoken.costing.stored_costs import DriftMonitor, StoredCosts, find_usable, load_or_measure
from foretoken.drafters.base import Drafter, require_rewind
from foretoken.drafters.none import NoDrafter
from foretoken.engine.batch import Batch
from foretoken.engine.core import EngineCore
from foretoken.errors import InputError, format_value
from foretoken.inputs import InputProcessor
from foretoken.models.base import Model
from foretoken.request import Request, SequenceState
from foretoken.sampling.keys import SequenceKey
from foretoken.sampling.params import SamplingParams

PROBE_PROMPT = "It was the first day of the"
PROBE_KEY = SequenceKey(
    2**63, 0
)  # seeds end below it: gamma's prior has not seen any row's numbers


@dataclass(slots=True)
class PairCosts:
    """Costs of a target and a drafter, by the kind of sampling and the number of rows."""

    target: Model
    drafter: Drafter
    inputs: InputProcessor
    core: EngineCore  # its models must be idle while costs are measured
    max_batch_size: int  # the most rows that costs are measured for
    name: str  # of the pair, for logs
    measured: dict[tuple[str, int], Costs] = field(default_factory=dict[tuple[str, int], Costs])
    _policies: dict[int, AdaptiveGamma] = field(default_factory=dict[int, AdaptiveGamma])
    _monitors: dict[str, DriftMonitor] = field(default_factory=dict[str, DriftMonitor])

    @property
    def drafts(self) -> bool:
        """Tell whether the drafter makes draft tokens of its own."""
        return not isinstance(self.drafter, NoDrafter)

    def get_step_costs(
        self, params: SamplingParams, batch_size: int = 1, *, remeasure: bool | None = None
    ) -> Costs:
        """Return the costs of steps of up to `rows` rows, measured once and stored on disk.

        Takes a second or more the first time; the models must be idle. again: whether stored ones
        that steps have contradicted are measured anew; None: where nobody waits for it.
        """
        batch_size, kind = self._round_batch_size(batch_size), costs.sampling_kind(params)
        if (kind, batch_size) not in self.measured:
            remeasure = self._may_measure(kind) if remeasure is None else remeasure
            single_costs = (
                self.get_step_costs(params, remeasure=remeasure) if batch_size > 1 else None
            )
            self.measured[kind, batch_size] = load_or_measure(
                *self._make_keys(kind, batch_size),
                lambda: self._probe_costs(params, batch_size, single_costs),
                remeasure=remeasure,
            )
        return self.measured[kind, batch_size]

    def find_nearest(
        self, params: SamplingParams, batch_size: int = 1
    ) -> tuple[Costs, Costs] | None:
        """Return the costs of one sequence and of up to `rows` without measuring: of this kind of
        sampling, or else of the other; in this process before those on disk. None where there are
        none."""
        batch_size = self._round_batch_size(batch_size)
        kinds = sorted(costs.SAMPLING_KINDS, key=lambda kind: kind != costs.sampling_kind(params))
        for find in (self._find_measured, self._find_stored):
            for kind in kinds:
                alone, shared = find(kind, 1), find(kind, batch_size)
                if alone is not None and shared is not None:
                    self.measured |= {(kind, 1): alone, (kind, batch_size): shared}
                    return alone, shared
        return None

    def ensure_costs(self, params: list[SamplingParams], batch_size: int) -> None:
        """Make costs known for requests with these params, up to `rows` at a time, before their
        first tokens: measured where there are none, unless sequences run or wait."""
        costliest = costs.select_costliest(params)
        with self.core.pause():
            if self.find_nearest(costliest, batch_size) is None and self.core.is_unused:
                self.get_step_costs(costliest, batch_size)

    def _find_measured(self, kind: str, batch_size: int) -> Costs | None:
        return self.measured.get((kind, batch_size))

    def _find_stored(self, kind: str, batch_size: int) -> Costs | None:
        return find_usable(*self._make_keys(kind, batch_size), remeasure=self._may_measure(kind))

    def _round_batch_size(self, batch_size: int) -> int:
        """Return a power of two: few are measured."""
        return 1 << (min(batch_size, self.max_batch_size) - 1).bit_length()

    def _may_measure(self, kind: str) -> bool:
        """Tell whether nobody waits for a text that runs."""
        return self.measured.keys() <= {(kind, 1)}

    def _make_keys(self, kind: str, batch_size: int) -> tuple[str | None, str | None]:
        """The names of costs on disk, and of those that they extend."""
        alone, name = (
            stored_costs.make_key(self.target, self.drafter, kind, n) for n in (1, batch_size)
        )
        return name, alone if batch_size > 1 else None

    def make_policy(
        self, requests: list[Request], gamma: int | None, batch_size: int
    ) -> GammaPolicy:
        """Return the policy for the draft tokens of these requests, among up to `rows` rows: always
        `gamma`, or where that is None what pays."""
        if gamma is None:
            predicted = any(request.prediction for request in requests)
            if not self.drafts and not predicted:
                forced = any(request.params.structured for request in requests)
                return ForcedTokensOnly() if forced else FixedGamma(0)
            if all(request.limit < 2 for request in requests):
                return FixedGamma(0)  # nothing is drafted for a first token
            return self._make_adaptive(
                costs.select_costliest([request.params for request in requests]), batch_size
            )
        gamma = int(gamma)  # NumPy's overflow
        context = self.target.context
        if context is not None and gamma + 1 > context:
            raise InputError(
                f"gamma is {format_value(gamma)}, but gamma + 1 must fit in the context of "
                f"{context}"
            )
        require_rewind(gamma, self.target, self.drafter)
        return FixedGamma(gamma)

    def _make_adaptive(self, params: SamplingParams, batch_size: int) -> GammaPolicy:
        """Return the policy that chooses gamma for such requests among up to `rows` rows, by the
        nearest costs. Without any they are measured, unless sequences run or wait: beside these,
        the costs of one row serve, or nothing is drafted.

        All calls with the same costs share one: rows that share a pass are weighed together.
        """
        found = self.find_nearest(params, batch_size)
        if found is None:
            self.ensure_costs([params], batch_size)
            found = self.find_nearest(params, batch_size) or self.find_nearest(params)
        if found is None:
            return ForcedTokensOnly()
        alone, shared = found
        policy = AdaptiveGamma(shared, alone, self.drafts, self.drafter.priors)
        return self._policies.setdefault(id(shared), policy)

    def adopt_measured(self, measured: Mapping[tuple[str, int], Costs]) -> None:
        """Take over the `measured` of another process with the same models."""
        self.measured |= measured

    def find_single_costs(self) -> Costs | None:
        """Costs of one row for the sampling that was measured last; None before."""
        measured = list(self.measured.items())  # at once: another thread may measure
        single_costs = [each for (_, rows), each in measured if rows == 1]
        return single_costs[-1] if single_costs else None

    def monitor_drift(self, seq: SequenceState) -> None:
        """Compare a finished row's steps with the costs. A later process measures contradicted ones
        again; here they stay."""
        kind = costs.sampling_kind(seq.request.params)
        alone = self.measured.get((kind, 1))
        if alone is None or seq.controls is not None:  # controls cost something of their own
            return
        monitor = self._monitors.setdefault(kind, DriftMonitor())
        if (
            monitor.add_steps(seq.records, costs_at_length(alone, [seq]))
            and monitor.off is not None
        ):
            name = stored_costs.make_key(self.target, self.drafter, kind, 1)
            if name is not None:
                stored_costs.store_contradiction(name, alone, monitor.off)

    def _probe_costs(
        self, params: SamplingParams, batch_size: int, single_costs: Costs | None
    ) -> StoredCosts:
        """Measure on the target's own text, ends of sequence ignored."""
        prompt, source = self.inputs.split_prompt(self._make_probe_ids())
        room = PROBE_TOKENS if self.target.context is None else self.target.context - len(prompt)
        request = Request(prompt, min(PROBE_TOKENS, room), PROBE_KEY, source=source)
        label = (
            f"{self.name}, {costs.sampling_kind(params)}, {batch_size} row{'s' * (batch_size > 1)}"
        )
        with self.core.release_models():
            batch = Batch(self.target, self.drafter)
            if single_costs is None:
                return probe(batch, request, params, self.inputs.ends.eos, label)
            return probe_shared(single_costs, batch, request, params, batch_size, label)

    def _make_probe_ids(self) -> list[int]:
        """A text where it fits the model, else up to four of the same id."""
        V, context = self.inputs.prompt_vocab_size, self.target.context
        reads = context and context - 1  # one place is for what is generated
        reads = self.target.source_context if self.target.encoder_decoder else reads
        tokenizer = self.inputs.tokenizer
        ids = tokenizer(PROBE_PROMPT).input_ids if tokenizer else []
        if ids and max(ids) < V and (reads is None or len(ids) <= reads):
            return ids
        token = min((i for i in self.inputs.ends.eos if 0 <= i < V), default=0)
        return [token] * (4 if reads is None else min(4, reads))
