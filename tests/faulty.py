"""A model with faults, which prompts call for by ids that no text of its own holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from foretoken import Draft, Draw, Speculator
from foretoken.drafters.lm import LMDrafter
from foretoken.generation_config import EndTokens
from foretoken.server.process import client as processes
from foretoken.server.process import startup
from foretoken.server.process.messages import EngineSetup
from oracle import random_model
from table import TableModel

V, CONTEXT = 320, 400
RAISES, EXHAUSTED, GREEDY, NAN, HANGS, SLOW = range(9, 15)
FAULTS = range(9, 15)
PACE = 0.03  # seconds of a slow step
LATE = 24  # tokens of a text at least where a fault comes
SPARE = 2**29  # bytes that an engine may take beyond those that it begins with


def distribution(seed: int) -> Any:
    """A random distribution, under which no text calls for a fault or ends by itself."""
    whole = random_model(seed, V)

    def without(text: tuple[int, ...]) -> list[float]:
        masses = [0.0 if i in FAULTS or i == 0 else p for i, p in enumerate(whole(text))]
        total = sum(masses)
        return [p / total for p in masses]

    return without


class Faulty(TableModel):
    """Has the faults of its rows' texts."""

    def score(self, blocks: Any, need: list[int]) -> torch.Tensor:
        logits = super().score(blocks, need)
        if any(SLOW in text for text in self._texts):
            time.sleep(PACE)
        for b, text in enumerate(self._texts):
            fault = next((id for id in text if id in FAULTS), None)
            if fault is None or len(text) < LATE:
                continue
            if fault == RAISES:
                raise OSError("the disk is gone")
            if fault == EXHAUSTED:
                raise MemoryError
            if fault == GREEDY:
                torch.zeros(SPARE).fill_(1.0)
            if fault == NAN:
                logits[b] = torch.nan
            if fault == HANGS:
                time.sleep(600)
        return logits


def pair(tokenizer: str) -> Speculator:
    spelling = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    draft = LMDrafter(TableModel(distribution(2), V), V)
    return Speculator(Faulty(distribution(1), V, context=CONTEXT), draft, spelling, EndTokens())


def work(pipe: Connection, setup: EngineSetup) -> None:
    """An engine's process whose model has faults, whose clock jumps and whose memory is short. The
    setup's target is a tokenizer's folder."""
    import resource

    jumps = iter(range(10**9))
    real = time.time
    time.time = lambda: real() + (3600 if next(jumps) % 2 else -3600)

    def load_checked(check: Callable[[Any], object], target: str, *_: Any, **__: Any) -> Speculator:
        made = pair(target)
        check(SimpleNamespace(name=target, tokenizer=made.tokenizer))
        return made

    startup.load_checked = load_checked  # pyright: ignore[reportAttributeAccessIssue]
    own = startup.measure_step_costs

    def measure(spec: Speculator, rows: int) -> None:
        own(spec, rows)
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + SPARE, resource.RLIM_INFINITY))

    startup.measure_step_costs = measure
    processes.run_engine_process(pipe, setup)


class Certain(Draw):
    """Always the likeliest."""

    def __call__(self, distribution: torch.Tensor, i: int) -> torch.Tensor:
        return distribution.argmax(-1)


class Liar(LMDrafter):
    """Guesses the argmax, and gives the whole distribution as the q it drew from."""

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        return super().propose(gamma, Certain(draw.keys, draw.lengths, draw.params))
