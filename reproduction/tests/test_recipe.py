"""Recipes: those that ship are valid, and mistakes are named with the nearest valid key."""

from __future__ import annotations

import os
from pathlib import Path
from typing import get_args

import pytest

from foretoken.errors import InputError
from reproduction.recipe import Name, Recipe, placed, read, shown_from
from reproduction.results import EXPERIMENTS

RECIPES = Path(__file__).parents[1] / "recipes"
LEAST = """
name = "mine"
title = "Mine"
target = "models/target"
[prompts]
file = "prompts.txt"
[[drafts]]
label = "small"
draft = "models/draft"
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def test_those_that_ship():
    recipes = [read(path) for path in sorted(RECIPES.glob("*.toml"))]
    assert len({recipe.name for recipe in recipes}) == len(recipes) >= 14
    for recipe in recipes:
        assert recipe.quick().tokens < recipe.tokens
        assert len({draft.label for draft in recipe.drafts}) == len(recipe.drafts)


def test_what_needs_no_data_has_its_prompts():
    for name in ("default", "translation", "own"):
        assert Path(read(RECIPES / f"{name}.toml").prompts.file).is_file()


def test_the_experiments_are_those_that_there_are():
    assert list(EXPERIMENTS) == list(get_args(Name))
    assert set(EXPERIMENTS) == set(Recipe.model_fields["experiments"].default)


def test_paths_are_relative_to_the_recipe(tmp_path):
    (tmp_path / "models" / "target").mkdir(parents=True)
    (tmp_path / "table.ngram").touch()
    recipe = read(written(tmp_path, LEAST))
    assert recipe.target == str(tmp_path / "models/target")
    assert recipe.drafts[0].draft == "models/draft"  # not there: the loader says so
    assert recipe.prompts.file == str(tmp_path / "prompts.txt")
    assert (
        placed("reproduction.ngram:table.ngram", tmp_path)
        == f"reproduction.ngram:{tmp_path / 'table.ngram'}"
    )
    (tmp_path / "link").symlink_to(tmp_path / "table.ngram")
    assert (
        placed("reproduction.heads:../gone", tmp_path)
        == f"reproduction.heads:{tmp_path.parent / 'gone'}"
    )
    assert placed("link", tmp_path) == str(tmp_path / "link")  # not what it leads to
    for name in ("google/t5-v1_1-xl", "lookup", "self:int8", "reproduction.ngram:other.ngram"):
        assert placed(name, tmp_path) == name
    shown = shown_from(recipe, tmp_path)
    assert shown.target == "models/target" and shown.prompts.file == "prompts.txt"
    assert shown.drafts == recipe.drafts  # a name
    assert shown_from(recipe, tmp_path / "elsewhere") == recipe


def test_the_digest_does_not_depend_on_where_the_recipe_lies(tmp_path):
    """Measurements that a checkout holds are used by others."""
    digests: set[str] = set()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "prompts.txt").write_text("one\ntwo\n")
        (tmp_path / name / "table.ngram").write_bytes(b"x")
        os.utime(tmp_path / name / "table.ngram", (1, 1))
        text = LEAST.replace("models/draft", "reproduction.ngram:table.ngram")
        digests.add(read(written(tmp_path / name, text)).digest)
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (('target = "', 'targt = "'), "targt is no key of a recipe; did you mean target?"),
        (('title = "Mine"', 'title = "Mine"\ngamas = [2]'), "did you mean gammas?"),
        (('draft = "', 'drafft = "'), "drafts.0.drafft is no key of a recipe; did you mean draft?"),
        (('file = "', 'files = "'), "prompts.files is no key of a recipe; did you mean file?"),
        (('draft = "', 'qqqq = "'), "drafts.0.qqqq is no key of a recipe; there are label, draft,"),
        (
            ('draft = "', 'paper = "T5-smal"\ndraft = "'),
            "'T5-smal': it must be one of 'Unigram'",
        ),
        (('title = "Mine"', 'title = "Mine"\ngammas = [2, 3, 2]'), "gammas has 2 twice"),
        (('title = "Mine"', 'title = "Mine"\ntemperatures = [0, 0.0]'), "has 0.0 twice"),
        (('title = "Mine"', 'title = "Mine"\nexperiments = []'), "experiments is []"),
        (('title = "Mine"', 'title = "Mine"\ngammas = [2, -1]'), "gammas.1 is -1: "),
        (
            ('title = "Mine"', 'title = "Mine"\ntask = "translate"'),
            "it must be one of 'text'",
        ),
        (('title = "Mine"', 'title = "Mine"\nlenience = [0]'), "lenience.0 is 0: "),
        (('title = "Mine"', 'title = "Mine"\ntokens = "many"'), "tokens is 'many': "),
        (
            ('title = "Mine"', 'title = "Mine"\npaper = "EnDee"'),
            "it must be one of 'GPT-like'",
        ),
        (
            ('title = "Mine"', 'title = "Mine"\nexperiments = ["walltme"]'),
            "experiments.0 is 'walltme': it must be one of 'acceptance', 'walltime'",
        ),
        (('name = "mine"\n', ""), "name is missing; give it"),
        (('label = "small"', 'label = "small"\norder = 2'), "small has a draft and an order"),
        (('label = "small"', 'label = "sm\\nall"'), "it has characters that are not allowed"),
        (('label = "small"', "label = 3"), "drafts.0.label is 3: it must be text"),
        (
            ("[[drafts]]", '[[drafts]]\nlabel = "small"\n[[drafts]]'),
            "labels has small twice",
        ),
        (
            ('label = "small"', 'label = "small"\ndistilled_from = "smal"'),
            "small is distilled_from 'smal'; give the label of another draft",
        ),
        (("[prompts]", "[prompts"), "cannot be read as a recipe"),
    ],
)
def test_mistakes_are_one_line(tmp_path, change, says):
    path = written(tmp_path, LEAST.replace(*change))
    with pytest.raises(InputError) as caught:
        read(path)
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_no_file_and_no_prompts(tmp_path):
    with pytest.raises(InputError, match="there is no .*none.toml"):
        read(tmp_path / "none.toml")
    recipe = read(written(tmp_path, LEAST))
    with pytest.raises(InputError, match=r"prompts of mine cannot be read"):
        _ = recipe.digest


def test_the_digest_follows_what_is_measured(tmp_path):
    (tmp_path / "prompts.txt").write_text("a\nb\n")
    recipe = read(written(tmp_path, LEAST))
    first = recipe.digest
    assert recipe.model_copy(update={"title": "Another"}).digest == first
    assert recipe.quick().digest != first
    (tmp_path / "prompts.txt").write_text("a\nc\n")
    assert recipe.digest != first


def test_what_a_draft_is_called_before_it_was_distilled_does_not_change_the_digest(tmp_path):
    (tmp_path / "prompts.txt").write_text("a\nb\n")
    other = LEAST + '[[drafts]]\nlabel = "other"\ndraft = "other"\n'
    first = read(written(tmp_path, other)).digest
    taught = read(written(tmp_path, other + 'distilled_from = "small"\n'))
    assert taught.drafts[1].distilled_from == "small" and taught.digest == first


def test_the_digest_follows_the_models(tmp_path):
    (tmp_path / "prompts.txt").write_text("a\nb\n")
    weights = tmp_path / "models" / "target" / "weights"
    weights.parent.mkdir(parents=True)
    weights.write_text("old")
    recipe = read(written(tmp_path, LEAST))
    first = recipe.digest
    weights.write_text("newer")
    assert recipe.digest != first
    weights.write_text("old")
    os.utime(weights, (1, 1))  # as a clone has it
    assert recipe.digest == first


def test_the_digest_follows_the_pair_that_ships(tmp_path, monkeypatch):
    recipe = read(RECIPES / "default.toml")
    first = recipe.digest
    monkeypatch.setattr("reproduction.recipe.SHIPPED", tmp_path)
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("other")
        assert recipe.digest != first
        first = recipe.digest


def test_a_draft_that_guesses_nothing_heads_no_report(tmp_path):
    none = LEAST.replace('draft = "models/draft"', 'draft = "none"')
    with pytest.raises(InputError, match="the first draft, small, is none, which guesses nothing"):
        read(written(tmp_path, none))
    behind = LEAST + '[[drafts]]\nlabel = "plain"\ndraft = "none"\n'
    assert read(written(tmp_path, behind)).drafts[1].draft == "none"
