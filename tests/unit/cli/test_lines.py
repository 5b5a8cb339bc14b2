"""The texts of a file's lines, wherever they are written: keyed by their lines."""

from __future__ import annotations

from foretoken.cli import option
from foretoken.cli.batch import COPY, Lines, here
from foretoken.cli.prompts import Line, ModelTask, Template
from foretoken.errors import InputError
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


def test_what_cannot_be_continued_is_passed_over(tmp_path) -> None:
    folder(tmp_path / "target", llama(320, eos_token_id=None), byte_level())
    asked = lines(str(tmp_path / "target"))
    found = dict(here(asked, [(n, i) for n in asked.tasks for i in range(2)]))
    for copy in range(2):
        error = found.pop((6, copy))
        assert isinstance(error, InputError) and "prompt 0 holds the id 999" in str(error)
    assert set(found) == {(2, 0), (2, 1), (5, 0), (5, 1)}
    assert all(
        len(completion.tokens) == 5 and completion.seed == asked.key(n)
        for n, completion in found.items()
    )
    assert found[2, 0].tokens != found[2, 1].tokens
