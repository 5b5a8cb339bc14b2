"""Rows through a batch of their own, step by step."""

from __future__ import annotations

from collections.abc import Generator

from foretoken.costing.gamma import FixedGamma, GammaPolicy
from foretoken.engine.batch import Batch
from foretoken.request import SequenceState
from foretoken.sampling.verifier import Verifier


def running(
    engine: Batch,
    rows: list[SequenceState],
    verifier: Verifier,
    gamma: GammaPolicy,
    *,
    behind: bool = False,
) -> Generator[None]:
    """Advance fresh rows, and no others, until all are finished; yields after the prefill and
    after every step. behind: as `Batch.join` takes it."""
    batch = Batch(engine.target, engine.drafter)  # which ends with this generator
    try:
        batch.join(rows, drafts=gamma != FixedGamma(0), defer_drafter=behind)
        yield
        while batch.seqs:
            batch.step(verifier, gamma.choose_gammas(batch.seqs))
            if outgrown := batch.outgrown_seqs:
                batch.leave(outgrown)
                batch.join(outgrown, drafts=gamma != FixedGamma(0))
            yield
    finally:
        batch.clear()
