"""Complete many prompts with Ray Data. Each worker has an engine, which runs several of Ray's
batches at a time, so that a batch does not wait for the last completion of another batch.

A completion depends only on its prompt, options and random key. If a worker dies, Ray gives its
batches to another worker, which generates the same completions.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import ray.data
import torch
from transformers.utils import logging as transformers

from foretoken.engine.async_engine import AsyncEngine
from foretoken.errors import ForetokenError
from foretoken.loading.load import load
from foretoken.sampling.params import SamplingParams

if TYPE_CHECKING:
    from foretoken.request import Completion
    from foretoken.speculator import Speculator

# Prompts per batch, which a worker begins together; prompts per block, which Ray retries as a whole
BATCH_SIZE, BLOCK_SIZE = 16, 64
MAX_TASKS_IN_FLIGHT = 2  # Ray tasks of a worker at a time


@dataclass(frozen=True, slots=True)
class PromptTask:
    """A request to a worker."""

    prompt: Callable[[Speculator], Any]  # called in the worker, returns the prompt for the model
    params: SamplingParams
    seed: tuple[int, int]
    gamma: int | None


def generate_completions(
    tasks: list[PromptTask], workers: int, threads: int, *life: Any
) -> Iterator[tuple[int, Completion | ForetokenError]]:
    """Complete the tasks with `workers` workers of `threads` threads each. Yield (index of the
    task, completion without steps or error) when a task finishes. `life`: the arguments of
    BatchWorker after `threads`."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # Ray warns about disabled progress bars
    items = [{"place": i, "task": pickle.dumps(task)} for i, task in enumerate(tasks)]
    pool = ray.data.ActorPoolStrategy(
        size=workers,
        max_tasks_in_flight_per_actor=MAX_TASKS_IN_FLIGHT,
        max_concurrent_calls_per_actor=MAX_TASKS_IN_FLIGHT,
    )
    completed = ray.data.from_items(
        items, override_num_blocks=-(-len(items) // BLOCK_SIZE)
    ).map_batches(
        BatchWorker,  # pyright: ignore[reportArgumentType]
        batch_size=BATCH_SIZE,
        compute=pool,
        num_cpus=threads,
        fn_constructor_args=(threads, *life),
        runtime_env={"env_vars": {"OMP_NUM_THREADS": str(threads)}},
    )
    for row in completed.iter_rows():
        yield int(row["place"]), pickle.loads(row["text"])


class BatchWorker:
    """A Ray actor with an engine, which completes batches of prompts. `names` (target and draft)
    and `loading` are arguments of `load`; `engine` has arguments of AsyncEngine."""

    def __init__(
        self,
        threads: int,
        names: tuple[str | None, str | None],
        loading: dict[str, Any],
        engine: dict[str, Any],
    ) -> None:
        transformers.disable_progress_bar()
        torch.set_num_threads(threads)
        self._spec = load(*names, **loading).prepared()
        self._engine: AsyncEngine = AsyncEngine(self._spec, **engine)
        self._engine_start: asyncio.Task[Any] | None = None

    async def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if self._engine_start is None:  # start it here, on the event loop that all batches share
            self._engine_start = asyncio.ensure_future(self._engine.__aenter__())
        await self._engine_start
        completions = await asyncio.gather(
            *(self._complete(pickle.loads(task)) for task in batch["task"])
        )
        return {
            "place": batch["place"],
            "text": np.array([*map(pickle.dumps, completions)], object),
        }

    async def _complete(self, task: PromptTask) -> Completion | ForetokenError:
        try:
            prompt, completion = task.prompt(self._spec), None
            options = {"gamma": task.gamma, "seed": task.seed}
            async for event in self._engine.stream(prompt, task.params, **options):
                completion = event.completion
        except ForetokenError as error:
            return type(error)(str(error))
        assert completion is not None
        return replace(completion, steps=[])
