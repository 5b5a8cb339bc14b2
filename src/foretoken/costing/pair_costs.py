"""Step costs of one pair in one process: measured or read from disk when first needed, then frozen.

Does not depend on callers' texts. Real steps are compared with the costs, so that a later process
measures wrong ones again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from foretoken.costing import costs, stored
from foretoken.costing.costs import Costs
from foretoken.costing.gamma import Adaptive, Fixed, FreeOnly, Gamma, by_length
from foretoken.costing.probe import TOKENS, probe, probe_shared
from foretoken.costing.stored import Kept, Watch, known, recalled
from foretoken.drafters.base import Drafter, require_rewind
from foretoken.drafters.none import NoDrafter
from foretoken.engine.batch import Batch
from foretoken.engine.core import EngineCore
from foretoken.errors import InputError, shown
from foretoken.inputs import InputProcessor
from foretoken.models.base import Model
from foretoken.request import Request, Row
from foretoken.sampling.keys import RowKey
from foretoken.sampling.params import SamplingParams

PROBE_PROMPT = "It was the first day of the"
PROBE_KEY = RowKey(2**63, 0)  # seeds end below it: gamma's prior has not seen any row's numbers


@dataclass(slots=True)
class PairCosts:
    """Costs of a target and a drafter, by the kind of sampling and the number of rows."""

    target: Model
    drafter: Drafter
    inputs: InputProcessor
    core: EngineCore  # its models must be idle while costs are measured
    batch: int  # the most rows that costs are measured for
    name: str  # of the pair, for logs
    measured: dict[tuple[str, int], Costs] = field(default_factory=dict[tuple[str, int], Costs])
    _policies: dict[int, Adaptive] = field(default_factory=dict[int, Adaptive])
    _watches: dict[str, Watch] = field(default_factory=dict[str, Watch])

    @property
    def drafts(self) -> bool:
        """Tell whether the drafter makes draft tokens of its own."""
        return not isinstance(self.drafter, NoDrafter)

    def step_costs(
        self, params: SamplingParams, rows: int = 1, *, again: bool | None = None
    ) -> Costs:
        """Return the costs of steps of up to `rows` rows, measured once and stored on disk.

        Takes a second or more the first time; the models must be idle. again: whether stored ones
        that steps have contradicted are measured anew; None: where nobody waits for it.
        """
        rows, kind = self._rounded(rows), costs.kind(params)
        if (kind, rows) not in self.measured:
            again = self._begins(kind) if again is None else again
            single_costs = self.step_costs(params, again=again) if rows > 1 else None
            self.measured[kind, rows] = recalled(
                *self._names(kind, rows),
                lambda: self._probed(params, rows, single_costs),
                again=again,
            )
        return self.measured[kind, rows]

    def nearest(self, params: SamplingParams, rows: int = 1) -> tuple[Costs, Costs] | None:
        """Return the costs of one sequence and of up to `rows` without measuring: of this kind of
        sampling, or else of the other; in this process before those on disk. None where there are
        none."""
        rows = self._rounded(rows)
        kinds = sorted(costs.KINDS, key=lambda kind: kind != costs.kind(params))
        for find in (self._here, self._stored):
            for kind in kinds:
                alone, shared = find(kind, 1), find(kind, rows)
                if alone is not None and shared is not None:
                    self.measured |= {(kind, 1): alone, (kind, rows): shared}
                    return alone, shared
        return None

    def learn(self, params: list[SamplingParams], rows: int) -> None:
        """Make costs known for requests with these params, up to `rows` at a time, before their
        first tokens: measured where there are none, unless sequences run or wait."""
        most = costs.dearest(params)
        with self.core.paused():
            if self.nearest(most, rows) is None and self.core.unused:
                self.step_costs(most, rows)

    def _here(self, kind: str, rows: int) -> Costs | None:
        return self.measured.get((kind, rows))

    def _stored(self, kind: str, rows: int) -> Costs | None:
        return known(*self._names(kind, rows), again=self._begins(kind))

    def _rounded(self, rows: int) -> int:
        """Return a power of two: few are measured."""
        return 1 << (min(rows, self.batch) - 1).bit_length()

    def _begins(self, kind: str) -> bool:
        """Tell whether nobody waits for a text that runs."""
        return self.measured.keys() <= {(kind, 1)}

    def _names(self, kind: str, rows: int) -> tuple[str | None, str | None]:
        """The names of costs on disk, and of those that they extend."""
        alone, name = (stored.key(self.target, self.drafter, kind, n) for n in (1, rows))
        return name, alone if rows > 1 else None

    def policy(self, requests: list[Request], gamma: int | None, rows: int) -> Gamma:
        """Return the policy for the draft tokens of these requests, among up to `rows` rows: always
        `gamma`, or where that is None what pays."""
        if gamma is None:
            predicted = any(request.prediction for request in requests)
            if not self.drafts and not predicted:
                forced = any(request.params.structured for request in requests)
                return FreeOnly() if forced else Fixed(0)
            if all(request.limit < 2 for request in requests):
                return Fixed(0)  # nothing is drafted for a first token
            return self._adaptive(costs.dearest([request.params for request in requests]), rows)
        gamma = int(gamma)  # NumPy's overflow
        context = self.target.context
        if context is not None and gamma + 1 > context:
            raise InputError(
                f"gamma is {shown(gamma)}, but gamma + 1 must fit in the context of {context}"
            )
        require_rewind(gamma, self.target, self.drafter)
        return Fixed(gamma)

    def _adaptive(self, params: SamplingParams, rows: int) -> Gamma:
        """Return the policy that chooses gamma for such requests among up to `rows` rows, by the
        nearest costs. Without any they are measured, unless sequences run or wait: beside these,
        the costs of one row serve, or nothing is drafted.

        All calls with the same costs share one: rows that share a pass are weighed together.
        """
        found = self.nearest(params, rows)
        if found is None:
            self.learn([params], rows)
            found = self.nearest(params, rows) or self.nearest(params)
        if found is None:
            return FreeOnly()
        alone, shared = found
        policy = Adaptive(shared, alone, self.drafts, self.drafter.priors)
        return self._policies.setdefault(id(shared), policy)

    def freeze(self, measured: Mapping[tuple[str, int], Costs]) -> None:
        """Take over the `measured` of another process with the same models."""
        self.measured |= measured

    def known(self) -> Costs | None:
        """Costs of one row for the sampling that was measured last; None before."""
        measured = list(self.measured.items())  # at once: another thread may measure
        single_costs = [each for (_, rows), each in measured if rows == 1]
        return single_costs[-1] if single_costs else None

    def watch(self, row: Row) -> None:
        """Compare a finished row's steps with the costs. A later process measures contradicted ones
        again; here they stay."""
        kind = costs.kind(row.request.params)
        alone = self.measured.get((kind, 1))
        if alone is None or row.controls is not None:  # controls cost something of their own
            return
        watch = self._watches.setdefault(kind, Watch())
        if watch.see(row.records, by_length(alone, [row])) and watch.off is not None:
            name = stored.key(self.target, self.drafter, kind, 1)
            if name is not None:
                stored.contradict(name, alone, watch.off)

    def _probed(self, params: SamplingParams, rows: int, single_costs: Costs | None) -> Kept:
        """Measure on the target's own text, ends of sequence ignored."""
        prompt, source = self.inputs.sides(self._probe_ids())
        room = TOKENS if self.target.context is None else self.target.context - len(prompt)
        request = Request(prompt, min(TOKENS, room), PROBE_KEY, source=source)
        label = f"{self.name}, {costs.kind(params)}, {rows} row{'s' * (rows > 1)}"
        with self.core.idle():
            batch = Batch(self.target, self.drafter)
            if single_costs is None:
                return probe(batch, request, params, self.inputs.ends.eos, label)
            return probe_shared(single_costs, batch, request, params, rows, label)

    def _probe_ids(self) -> list[int]:
        """A text where it fits the model, else up to four of the same id."""
        V, context = self.inputs.readable, self.target.context
        reads = context and context - 1  # one place is for what is generated
        reads = self.target.source_context if self.target.encoder_decoder else reads
        tokenizer = self.inputs.tokenizer
        ids = tokenizer(PROBE_PROMPT).input_ids if tokenizer else []
        if ids and max(ids) < V and (reads is None or len(ids) <= reads):
            return ids
        token = min((i for i in self.inputs.ends.eos if 0 <= i < V), default=0)
        return [token] * (4 if reads is None else min(4, reads))
