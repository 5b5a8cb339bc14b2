"""The pictures of a benchmark are written, and name their contestants."""

from __future__ import annotations

from foretoken.lab.bench.figures import Figures, Throughput, TimeShares, draw, draw_batches
from foretoken.lab.estimate import Spread


def figures(name: str, gamma: int | None, shares: TimeShares | None) -> Figures:
    time = Spread(0.1, 0.09, 0.12, 3)
    return Figures(name, gamma, time, time, 10.0, 1.0, None, shares, None, None)


def test_both_pictures(tmp_path):
    shares = TimeShares(0.2, 0.5, 0.1, 0.2)
    table = [figures("foretoken", gamma, shares) for gamma in (0, 4, None)]
    paths = draw([*table, figures("a peer", 4, None)], tmp_path, "the title")
    assert [path.name for path in paths] == ["time-per-token.svg", "shares.svg"]
    times, parts = (path.read_text() for path in paths)
    for label in ("the title", "a peer", "foretoken, automatic"):
        assert label in times
    for label in ("the title", "draft", "target", "verify", "rest", "gamma 4"):
        assert label in parts


def test_a_line_for_each_contestant(tmp_path):
    rate = Spread(10.0, 9.0, 11.0, 3)
    contestants = [("foretoken", 0), ("foretoken", None), ("a peer", 4)]
    table = {
        texts: [
            Throughput(*key, rate, 1.0, {}, None, None, None, None, None, None)
            for key in contestants
        ]
        for texts in (1, 8)
    }
    path = draw_batches(table, tmp_path, "the title")
    assert path.name == "throughput.svg"
    for title in ("the title", "a peer, gamma 4", "foretoken, automatic", "texts at once"):
        assert title in path.read_text()
