"""Other engines at work on this machine while one is measured: replicas that share a machine take
memory and caches from one another.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from multiprocessing.connection import Connection

from foretoken.errors import ForetokenError, RefusedError, one_line
from foretoken.lab.measurement.result import Options
from foretoken.options import Prompt


@contextmanager
def beside(engines: int, options: Options, prompts: Sequence[Prompt], rows: int) -> Iterator[None]:
    """So many, in processes of their own, with the pair of `options`, each `rows` requests at a
    time for as long as the block runs. RefusedError where one of them cannot work."""
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    pipes = [context.Pipe(duplex=False) for _ in range(engines)]
    workers = [
        context.Process(target=_work, args=(theirs, options, list(prompts), rows), daemon=True)
        for _, theirs in pipes
    ]
    try:
        for worker, (_, theirs) in zip(workers, pipes, strict=True):
            worker.start()
            theirs.close()  # so that its end is seen here
        for ours, _ in pipes:
            _require_begun(ours)
        yield
    finally:
        for worker in workers:
            if worker.pid is not None:
                worker.terminate()
                worker.join()


def _require_begun(pipe: Connection) -> None:
    try:
        problem = pipe.recv()
    except EOFError:
        problem = "its process has ended"
    if problem:
        raise RefusedError(f"an engine beside the measured one cannot work: {problem}")


def _work(pipe: Connection, options: Options, prompts: list[Prompt], rows: int) -> None:
    """Texts without an end; says "" when the first is there, or what is wrong."""
    from foretoken import Engine, load  # late: torch, in the process that needs it

    wishes = replace(options.wishes, ignore_eos=True)
    try:
        with Engine(load(options.target, options.draft, **options.loading), rows) as engine:
            for number in count():
                engine.add(prompts[number % len(prompts)], wishes, seed=(number, 1))
                while engine.running + engine.waiting >= rows:
                    engine.step()
                if number == rows:
                    pipe.send("")
    except ForetokenError as error:
        pipe.send(one_line(error))
