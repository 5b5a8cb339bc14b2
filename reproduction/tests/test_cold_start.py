"""A command imports little before it knows that it has something to do."""

from __future__ import annotations

from cold import HEAVY, modules


def test_help_imports_nothing_heavy():
    calls = [("--help",), *((name, "--help") for name in ("report", "theory", "simulate", "train"))]
    for (code, names, _), call in zip(modules(*calls, name="reproduction"), calls, strict=True):
        assert code == 0 and names & {*HEAVY, "numpy", "huggingface_hub"} == set(), call


def test_a_recipe_that_is_missing_is_told_before_torch_is_imported():
    ((code, names, said),) = modules(("report", "no-such-file", "--out", "O"), name="reproduction")
    assert code == 2 and said.startswith("error: there is no no-such-file")
    assert names & {"torch", "transformers", "native"} == set()


def test_theory_imports_numpy_at_most():
    calls = [("theory", "--alpha", "0.8", "--c", "0.1"), ("theory", "--alpha", "2", "--c", "0")]
    for (code, names, _), expected in zip(
        modules(*calls, name="reproduction"), (0, 2), strict=True
    ):
        assert code == expected and names & {*HEAVY, "huggingface_hub"} == set()
