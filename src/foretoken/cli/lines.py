"""The texts of a file's lines: by an engine in this process, or by workers on Ray."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from foretoken.cli import option, task
from foretoken.cli.cluster import Cluster, needing
from foretoken.cli.messages import Template
from foretoken.cli.results import Name, Tally
from foretoken.cli.task import ModelTask
from foretoken.errors import ForetokenError
from foretoken.sampling.params import SamplingParams

if TYPE_CHECKING:
    from foretoken.request import Completion
    from foretoken.serving.engine import Engine

READ = 64  # prompts that run or wait
Complete = Callable[[list[Name], Tally], Iterator[tuple[Name, "Completion"]]]


@dataclass(frozen=True, slots=True)
class Lines:
    """What is asked of which models: `tasks` by their lines' numbers, `speculation` as `generate`
    has them."""

    tasks: dict[int, ModelTask]
    names: tuple[str | None, str | None]
    loading: option.PairLoading
    template: Template
    seed: int
    speculation: dict[str, Any]

    def key(self, name: Name) -> tuple[int, int]:
        """A text is keyed by its line, whatever comes before."""
        line, copy = name
        return task.key(self.tasks[line], line - 1, copy, self.seed)

    def params(self, name: Name) -> SamplingParams:
        return replace(self.tasks[name[0]].params, num_return_sequences=1)

    @property
    def engine(self) -> dict[str, Any]:
        return {"rule": self.speculation["rule"], "lenience": self.speculation["lenience"]}


def completing(lines: Lines, where: Cluster) -> AbstractContextManager[Complete]:
    """Where the options say."""
    return on_ray(lines, where) if where.used else here(lines)


@contextmanager
def here(lines: Lines) -> Iterator[Complete]:
    """In this process."""
    spec = lines.loading.load(*lines.names)
    from foretoken.serving.engine import Engine  # late: torch, which takes seconds

    def add(name: Name) -> int:
        each = lines.tasks[name[0]]
        with each.line.named():
            text = lines.template.prompt(each.line, spec)
            options = {"gamma": lines.speculation["gamma"], "seed": lines.key(name)}
            return engine.add(text, lines.params(name), **options)

    with Engine(spec, **lines.engine) as engine:
        yield partial(_stepped, engine, add)


@contextmanager
def on_ray(lines: Lines, where: Cluster) -> Iterator[Complete]:
    """By workers on Ray; left open, one of all threads."""
    with needing("ray"):
        from foretoken.cluster import session

        session.prepare(where.address)  # before ray is imported
        from foretoken.cluster import lines as cluster
    session.join(where.address)
    try:
        count = where.replicas or 1
        each = session.threads(count, where.threads)
        session.require_memory(count, session.weights(*lines.names), 0)
        workers = cluster.Workers(count, each, *lines.names, lines.loading.arguments, lines.engine)

        def complete(names: list[Name], tally: Tally) -> Iterator[tuple[Name, Completion]]:
            asks = [
                cluster.PromptTask(
                    partial(lines.template.prompt, lines.tasks[name[0]].line),
                    lines.params(name),
                    lines.key(name),
                    lines.speculation["gamma"],
                )
                for name in names
            ]
            for place, text in cluster.texts(asks, workers):
                if isinstance(text, ForetokenError):
                    line = lines.tasks[names[place][0]].line
                    _tell(f"{line.place}: {text}" if line.place else text, tally)
                else:
                    yield names[place], text

        yield complete
    finally:
        session.leave()


def _stepped(
    engine: Engine, add: Callable[[Name], int], names: list[Name], tally: Tally
) -> Iterator[tuple[Name, Completion]]:
    """Each as soon as it is done; so many prompts are read that none has to be waited for."""
    unsent, running = iter(names), dict[int, Name]()
    while True:
        while len(running) < READ and (name := next(unsent, None)) is not None:
            try:
                running[add(name)] = name
            except ForetokenError as error:
                _tell(error, tally)
        if not running:
            return
        for event in engine.step():
            if event.completion is not None:
                yield running.pop(event.id), event.completion


def _tell(error: object, tally: Tally) -> None:
    """A prompt that cannot be continued is passed over."""
    tally.failed += 1
    print(f"error: {error}", file=sys.stderr)
