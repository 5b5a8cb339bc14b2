"""The texts of a file's lines, wherever they are written: keyed by their lines."""

from __future__ import annotations

from foretoken.cli import option
from foretoken.cli.batch import Lines, Tally, completing, here, on_ray
from foretoken.cli.cluster import Cluster
from foretoken.cli.generate import _origin
from foretoken.cli.messages import Template
from foretoken.cli.prompts import COPY, Line, ModelTask
from foretoken.sampling.params import SamplingParams
from tiny import byte_level, folder, llama

PARAMS = SamplingParams(1.0, max_new_tokens=5, num_return_sequences=2)


def lines(target: str = "target") -> Lines:
    prompts = {2: Line([1, 2]), 5: Line([3], seed=9), 6: Line([999], place="line 6")}
    tasks = {n: ModelTask(n, line, {}, PARAMS) for n, line in prompts.items()}
    loading = option.PairLoading(dtype="float64", runtime="transformers")
    speculation = {"gamma": 2, "rule": "block", "lenience": 1.0}
    return Lines(tasks, (target, "none"), loading, Template(), 4, speculation)


def test_keys_are_those_of_lines_and_copies() -> None:
    asked = lines()
    assert asked.key((2, 0)) == (4, 1) and asked.key((2, 1)) == (4, 1 + COPY)
    assert asked.key((5, 1)) == (9, 1)
    assert asked.params((2, 0)).num_return_sequences == 1


def test_what_cannot_be_continued_is_told_and_passed_over(tmp_path, capsys) -> None:
    folder(tmp_path / "target", llama(320, eos_token_id=None), byte_level())
    asked, tally = lines(str(tmp_path / "target")), Tally()
    names = [(n, i) for n in asked.tasks for i in range(2)]
    with completing(asked, Cluster()) as complete:
        found = dict(complete(names, tally))
    assert set(found) == {(2, 0), (2, 1), (5, 0), (5, 1)} and tally.failed == 2
    assert capsys.readouterr().err.count("error: line 6: prompt 0 holds the id 999") == 2
    assert all(
        len(completion.tokens) == 5 and completion.seed == asked.key(n)
        for n, completion in found.items()
    )
    assert found[2, 0].tokens != found[2, 1].tokens


def test_options_say_where() -> None:
    one, other = completing(lines(), Cluster()), completing(lines(), Cluster(ray="auto"))
    assert one.func is here.__wrapped__ and other.func is on_ray.__wrapped__  # pyright: ignore


def test_results_of_version_0_1_0_are_resumed() -> None:
    assert _origin(lines(), (2, 0)) == "db2d12ad9d75f405"  # as that version wrote it
