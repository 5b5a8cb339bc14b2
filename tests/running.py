"""Rows through a batch of their own, step by step."""

from __future__ import annotations

from collections.abc import Generator

from foretoken.costing.gamma import Fixed, Gamma
from foretoken.engine.batch import Batch
from foretoken.request import Row
from foretoken.sampling.verifier import Verifier


def running(
    engine: Batch, rows: list[Row], verifier: Verifier, gamma: Gamma, *, behind: bool = False
) -> Generator[None]:
    """Advance fresh rows, and no others, until all are finished; yields after the prefill and
    after every step. behind: as `Batch.join` takes it."""
    batch = Batch(engine.target, engine.drafter)  # which ends with this generator
    try:
        batch.join(rows, drafts=gamma != Fixed(0), behind=behind)
        yield
        while batch.rows:
            batch.step(verifier, gamma.ask(batch.rows))
            if outgrown := batch.outgrown:
                batch.leave(outgrown)
                batch.join(outgrown, drafts=gamma != Fixed(0))
            yield
    finally:
        batch.clear()
