"""Rows through the step until all are finished: token ids in, token ids out, on one thread."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from time import perf_counter

import torch

from foretoken.claim import claimed
from foretoken.drafters.base import Drafter, require_apart
from foretoken.drafters.forced import ForcedDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.gamma import Fixed, Gamma
from foretoken.models.base import Model
from foretoken.request import Row
from foretoken.sampling.distributions import working
from foretoken.sampling.judge import Judge
from foretoken.sampling.logprobs import logprobs
from foretoken.step import step

CHUNK = 32  # positions of a prompt in a pass whose logits are all needed: they take much memory


class Engine:
    """A target and its drafter. One batch at a time: rows share the models' caches."""

    def __init__(self, target: Model, drafter: Drafter) -> None:
        require_apart(target, drafter)
        self.target, self.drafter = target, drafter

    def run(self, rows: list[Row], judge: Judge, gamma: Gamma) -> Generator[None]:
        """Advance fresh rows until all are finished; yields after the prefill and after every step.

        `gamma` is asked before every step, and trimmed near a row's end. Raises RefusedError where
        another run has the target or the drafter, or a part of them.
        """
        plain = gamma == Fixed(0)
        drafter = NoDrafter() if plain else self.drafter  # plain decoding costs no drafter's work
        if not plain and any(row.request.params.structured for row in rows):
            drafter = ForcedDrafter(drafter)
        with claimed(self.target, drafter) as claim:
            began = perf_counter()
            claim.expect(len(rows))
            with threads(self.target):
                self._start(rows, drafter)
            for row in rows:
                row.prefill_seconds = perf_counter() - began
            yield
            active = list(rows)
            while active:
                asked = zip(gamma.ask(active), active, strict=True)
                trimmed = [min(g, row.room - 1) for g, row in asked]
                with threads(self.target):
                    step(active, self.target, drafter, judge, trimmed)
                for row in active:
                    row.seconds = perf_counter() - began
                claim.leave([b for b, row in enumerate(active) if row.finish_reason])
                active = [row for row in active if not row.finish_reason]
                yield

    def _start(self, rows: list[Row], drafter: Drafter) -> None:
        prompts = [row.request.prompt for row in rows]
        sources = (
            [row.request.source or [] for row in rows] if self.target.encoder_decoder else None
        )
        told = [row.request.params.prompt_logprobs is not None for row in rows]
        heads = [[] if t else prompt[:-1] for t, prompt in zip(told, prompts, strict=True)]
        self.target.start(heads, sources)
        if any(told):
            self._report(rows, told)
        # copies, which a drafter may keep and add to
        sources = sources and [list(source) for source in sources]
        drafter.start(list(range(len(rows))), [list(prompt) for prompt in prompts], sources)

    @torch.inference_mode()
    def _report(self, rows: list[Row], told: list[bool]) -> None:
        """Read the prompts of rows that are told its logprobs, which a prefill does not give."""
        texts = [row.request.prompt if t else [] for t, row in zip(told, rows, strict=True)]
        for at in range(0, max(map(len, texts)) - 1, CHUNK):
            blocks = [text[:-1][at : at + CHUNK] for text in texts]
            logits = self.target.score(blocks, [len(block) for block in blocks])
            for row, block, own in zip(rows, blocks, logits, strict=True):
                if block:
                    known = own[: len(block)].to(working(own.dtype)).log_softmax(-1)
                    following = row.request.prompt[at + 1 : at + 1 + len(block)]
                    count = row.request.params.prompt_logprobs or 0
                    row.prompt_logprobs += logprobs(known, following, count)


@contextmanager
def threads(target: Model) -> Iterator[None]:
    """Torch on one thread while the target runs in OpenVINO: torch's idle threads spin, and would
    take the cores from it. Outside the `with` torch has the caller's setting."""
    count = torch.get_num_threads()
    if target.runtime != "openvino" or count == 1:
        yield
        return
    try:
        torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(count)
