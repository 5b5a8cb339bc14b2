"""Step costs of one pair of target and drafter in one process. They are measured or loaded from
disk when they are first needed, then frozen.

The costs do not depend on users' prompts. Real steps are compared with the costs; if the steps
differ, a later process measures the costs again.
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
    get_costs_at_length,
)
from foretoken.costing.probe import PROBE_TOKENS, probe, probe_shared
from foretoken.costing.stored_costs import DriftMonitor, StoredCosts, find_usable, load_or_measure
from foretoken.drafters.base import Drafter, require_rewind
from foretoken.drafters.choice import DrafterChoice
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
PROBE_KEY = SequenceKey(2**63, 0)  # above all seeds: no request has the probe's random numbers


@dataclass(slots=True)
class PairCosts:
    """Costs of a target and a drafter, by the kind of sampling and the batch size."""

    target: Model
    drafter: Drafter
    inputs: InputProcessor
    core: EngineCore  # its models must be idle while costs are measured
    max_batch_size: int  # the largest batch size that costs are measured for
    name: str  # of the pair, for logs
    measured: dict[tuple[str, int], Costs] = field(default_factory=dict[tuple[str, int], Costs])
    # of each drafter of a `DrafterChoice`, with the target
    alternatives: list[PairCosts] = field(default_factory=list["PairCosts"], init=False)
    _policies: dict[tuple[int, int], AdaptiveGamma] = field(
        default_factory=dict[tuple[int, int], AdaptiveGamma]
    )
    _monitors: dict[str, DriftMonitor] = field(default_factory=dict[str, DriftMonitor])

    def __post_init__(self) -> None:
        if isinstance(self.drafter, DrafterChoice):
            self.alternatives = [
                PairCosts(self.target, part, self.inputs, self.core, self.max_batch_size, self.name)
                for part in self.drafter.parts
            ]

    @property
    def drafts(self) -> bool:
        """Return whether there is a drafter."""
        return not isinstance(self.drafter, NoDrafter)

    def get_step_costs(
        self, params: SamplingParams, batch_size: int = 1, *, remeasure: bool | None = None
    ) -> Costs:
        """Return the costs of steps of up to `batch_size` sequences, measured once and stored on
        disk.

        A measurement takes a second or more, and the models must be idle. `remeasure`: whether to
        measure again if real steps have contradicted the stored costs; None: only if no request
        waits for the measurement. For several drafters, measure all, and return the costs of the
        first.
        """
        if self.alternatives:
            every = [
                each.get_step_costs(params, batch_size, remeasure=remeasure)
                for each in self.alternatives
            ]
            return every[0]
        batch_size, kind = self._round_batch_size(batch_size), costs.classify_sampling(params)
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
        """Return the costs for batch size 1 and for batch sizes up to `batch_size`, without
        measuring; None if there are none. Costs of this process are preferred to costs on disk;
        within each group, costs for the same kind of sampling (greedy or sampled) are preferred.
        So the costs for batch size 1 do not depend on `batch_size`. For several drafters, return
        the costs of the first, if all have costs."""
        if self.alternatives:
            every = [each.find_nearest(params, batch_size) for each in self.alternatives]
            return None if None in every else every[0]
        single = self._find_nearest_kind(params, 1)
        shared = self._find_nearest_kind(params, self._round_batch_size(batch_size))
        return None if single is None or shared is None else (single, shared)

    def _find_nearest_kind(self, params: SamplingParams, batch_size: int) -> Costs | None:
        kinds = sorted(
            costs.SAMPLING_KINDS, key=lambda kind: kind != costs.classify_sampling(params)
        )
        for find in (self._find_measured, self._find_stored):
            for kind in kinds:
                if (found := find(kind, batch_size)) is not None:
                    self.measured[kind, batch_size] = found
                    return found
        return None

    def ensure_costs(self, params: list[SamplingParams], batch_size: int) -> None:
        """Measure the costs for requests with these params in batches of up to `batch_size`. Do
        nothing if these costs are known, or if sequences run or wait."""
        costliest = costs.select_costliest(params)
        with self.core.pause():
            if self.find_nearest(costliest, batch_size) is None and self.core.is_unused:
                self.get_step_costs(costliest, batch_size)

    def _find_measured(self, kind: str, batch_size: int) -> Costs | None:
        return self.measured.get((kind, batch_size))

    def _find_stored(self, kind: str, batch_size: int) -> Costs | None:
        return find_usable(*self._make_keys(kind, batch_size), remeasure=self._may_measure(kind))

    def _round_batch_size(self, batch_size: int) -> int:
        """Return the batch size, limited to `max_batch_size`, rounded up to a power of two, so that
        few sizes are measured."""
        return 1 << (min(batch_size, self.max_batch_size) - 1).bit_length()

    def _may_measure(self, kind: str) -> bool:
        """Return whether stored costs may be measured again: only while this process has used no
        costs except costs of this kind for batch size 1, because no request waits then."""
        return self.measured.keys() <= {(kind, 1)}

    def _make_keys(self, kind: str, batch_size: int) -> tuple[str | None, str | None]:
        """Return the key of the costs on disk, and the key of the costs for batch size 1 that these
        costs extend (None if `batch_size` is 1)."""
        single, name = (
            stored_costs.make_key(self.target, self.drafter, kind, n) for n in (1, batch_size)
        )
        return name, single if batch_size > 1 else None

    def make_policy(
        self, requests: list[Request], gamma: int | None, batch_size: int
    ) -> GammaPolicy:
        """Return the gamma policy of these requests in batches of up to `batch_size`: a fixed
        `gamma`, or an adaptive policy if `gamma` is None."""
        if gamma is None:
            predicted = any(request.prediction for request in requests)
            if not self.drafts and not predicted:
                forced = any(request.params.structured for request in requests)
                return ForcedTokensOnly() if forced else FixedGamma(0)
            if all(request.limit < 2 for request in requests):
                return FixedGamma(0)  # the first new token has no draft tokens
            return self._make_adaptive(
                costs.select_costliest([request.params for request in requests]), batch_size
            )
        gamma = int(gamma)  # a NumPy integer may overflow
        context = self.target.context
        if context is not None and gamma + 1 > context:
            raise InputError(
                f"gamma is {format_value(gamma)}, but gamma + 1 must fit in the context of "
                f"{context} tokens; give at most {context - 1}"
            )
        require_rewind(gamma, self.target, self.drafter)
        return FixedGamma(gamma)

    def _make_adaptive(self, params: SamplingParams, batch_size: int) -> GammaPolicy:
        """Return a policy that chooses gamma for requests with these params by the nearest costs.

        Missing costs are measured, unless sequences run or wait. In that case the policy uses the
        costs for batch size 1; without these costs, the policy drafts only tokens that a grammar
        forces. All calls with the same costs share one policy, which chooses for all sequences of a
        batch together.
        """
        if self.find_nearest(params, batch_size) is None:
            self.ensure_costs([params], batch_size)
            if self.find_nearest(params, batch_size) is None:
                batch_size = 1
        if (found := self.find_nearest(params, batch_size)) is None:
            return ForcedTokensOnly()
        single, shared = found
        every = [each.find_nearest(params, batch_size) for each in self.alternatives]
        alternatives = tuple(
            (each[1].with_target_costs(shared), each[0].with_target_costs(single))
            for each in every
            if each is not None
        )
        policy = AdaptiveGamma(
            shared,
            single,
            self.drafts,
            self.drafter.priors,
            self.target.count_padded_positions,
            alternatives,
        )
        return self._policies.setdefault((id(single), id(shared)), policy)

    def adopt_measured(self, measured: Mapping[tuple[str, int], Costs]) -> None:
        """Add the `measured` costs of another process with the same models."""
        self.measured |= measured

    def find_single_costs(self) -> Costs | None:
        """Return the latest measured costs for batch size 1; None if there are none. For several
        drafters, return those of the first."""
        if self.alternatives:
            return self.alternatives[0].find_single_costs()
        measured = list(self.measured.items())  # a copy: another thread may add some
        single_costs = [each for (_, batch_size), each in measured if batch_size == 1]
        return single_costs[-1] if single_costs else None

    def monitor_drift(self, seq: SequenceState) -> None:
        """Compare a finished sequence's steps with the costs. If the steps contradict the costs, a
        later process measures the costs again; this process continues to use them."""
        kind = costs.classify_sampling(seq.request.params)
        single = self.measured.get((kind, 1))
        if single is None or seq.controls is not None:  # the costs were measured without controls
            return
        monitor = self._monitors.setdefault(kind, DriftMonitor())
        if (
            monitor.add_steps(seq.records, get_costs_at_length(single, [seq]))
            and monitor.off is not None
        ):
            name = stored_costs.make_key(self.target, self.drafter, kind, 1)
            if name is not None:
                stored_costs.store_contradiction(name, single, monitor.off)

    def _probe_costs(
        self, params: SamplingParams, batch_size: int, single_costs: Costs | None
    ) -> StoredCosts:
        """Measure the costs with sequences that continue `PROBE_PROMPT` and do not stop at an
        end-of-sequence token."""
        prompt, source = self.inputs.split_prompt(self._make_probe_ids())
        room = PROBE_TOKENS if self.target.context is None else self.target.context - len(prompt)
        request = Request(prompt, min(PROBE_TOKENS, room), PROBE_KEY, source=source)
        label = f"{self.name}, {costs.classify_sampling(params)}, batch size {batch_size}"
        with self.core.release_models():
            batch = Batch(self.target, self.drafter)
            if single_costs is None:
                return probe(batch, request, params, self.inputs.ends.eos, label)
            return probe_shared(single_costs, batch, request, params, batch_size, label)

    def _make_probe_ids(self) -> list[int]:
        """Return the ids of `PROBE_PROMPT` if they fit the model, else up to four equal ids."""
        V, context = self.inputs.prompt_vocab_size, self.target.context
        limit = context and context - 1  # one position for a new token
        limit = self.target.source_context if self.target.encoder_decoder else limit
        tokenizer = self.inputs.tokenizer
        ids = tokenizer(PROBE_PROMPT).input_ids if tokenizer else []
        if ids and max(ids) < V and (limit is None or len(ids) <= limit):
            return ids
        token = min((i for i in self.inputs.ends.eos if 0 <= i < V), default=0)
        return [token] * (4 if limit is None else min(4, limit))
