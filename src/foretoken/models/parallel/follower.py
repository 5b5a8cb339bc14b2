"""The life of a rank other than 0: it makes the calls that it is sent, until rank 0 ends.

    python -m foretoken.models.parallel.follower STORE RANK RANKS THREADS

is what `processes` starts: its standard input stays open for as long as rank 0 lives.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import torch
import torch.distributed as dist

from foretoken.errors import ForetokenError, one_line
from foretoken.models.parallel.part import Call, Part, join


def follow(part: Part) -> None:
    """Make every call that rank 0 sends, until it has no more."""
    while True:
        sent: list[Call | None] = [None]
        dist.broadcast_object_list(sent, 0)
        if (call := sent[0]) is None:
            return
        try:
            part.play(call)
        except ForetokenError:
            if call.makes:  # of this rank's own reading: rank 0 waits for it
                raise
            # else of what was asked, before ranks have talked: rank 0 raises it too


def live(joined: Callable[[], None]) -> None:
    """All of it; `joined` meets the other ranks."""
    try:
        joined()
        follow(Part())
    except Exception as error:
        own = isinstance(error, ForetokenError)
        message = one_line(error) if own else f"{type(error).__name__}: {one_line(error)}"
        print(message, file=sys.stderr, flush=True)  # which rank 0 tells
        os._exit(1)  # at once: rank 0 waits in a call


def _end_with_rank_0() -> None:
    sys.stdin.buffer.read()  # returns when rank 0 closes it, or has ended in whatever way
    os._exit(0)  # at once: the main thread may wait for another rank


def main() -> None:
    store, rank, ranks, threads = sys.argv[1:]
    Thread(target=_end_with_rank_0, daemon=True).start()
    torch.set_num_threads(int(threads))
    live(lambda: join(Path(store), int(rank), int(ranks)))


if __name__ == "__main__":
    main()
