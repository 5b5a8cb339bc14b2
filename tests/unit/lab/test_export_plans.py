"""What can be exported, and which facts are told of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretoken.errors import ForetokenError
from foretoken.lab.export import ExportSetting, Fact, System, converted, export

SETTING = ExportSetting("target", "draft", 3)
FACTS = (Fact("all", "s"), Fact("model", "s", "model"), Fact("lookup", "s", "lookup"))
SYSTEM = System("other", "1.0", "https://other", FACTS, FACTS, lambda setting: [setting.target])


def test_facts_are_those_of_the_kind_of_draft():
    for draft, gamma, lacks in (
        ("draft", 3, ["all", "model"]),
        ("lookup", 3, ["all", "lookup"]),
        ("none", 0, ["all"]),
        ("self:int4", 0, ["all"]),  # no draft token is made
    ):
        exported = export(SYSTEM, replace(SETTING, draft=draft, gamma=gamma))
        assert [fact.text for fact in exported.lacks] == lacks
        # none is verified
        assert [fact.text for fact in exported.distribution] == (lacks if gamma else [])
        assert exported.steps == ["target"]


@pytest.mark.parametrize("draft", ["self", "self:0-3", "heads:h", "ngram:n", "copy", "uniform"])
def test_drafts_of_this_package_are_refused(draft: str):
    with pytest.raises(ForetokenError, match=f"draft {draft} .*: no other system has it; give"):
        export(SYSTEM, replace(SETTING, draft=draft))


def test_what_a_system_does_not_have_is_refused():
    with pytest.raises(ForetokenError, match="target is an encoder-decoder, and other 1.0 has no"):
        export(SYSTEM, replace(SETTING, encoder_decoder=True))
    versioned = replace(SETTING, draft_revision="v2")
    assert export(SYSTEM, versioned).steps
    with pytest.raises(ForetokenError, match="revision v2 .* other reads converted files"):
        export(replace(SYSTEM, converts=True), versioned)


def test_invalid_numbers():
    with pytest.raises(ForetokenError, match="gamma is -1; give 0 or more"):
        replace(SETTING, gamma=-1)
    for temperature in ("nan", "inf"):
        with pytest.raises(ForetokenError, match=f"temperature is {temperature}; give 0 or more"):
            replace(SETTING, temperature=float(temperature))
    with pytest.raises(ForetokenError, match="draft is empty; give a folder or a hub id"):
        replace(SETTING, draft="")


def test_what_a_plan_was_measured_with_and_the_system_is_not_told():
    exported = export(SYSTEM, replace(SETTING, measured="--top-k 20 --dtype int8"))
    assert exported.lacks[0].text == (
        "the plan was measured with --top-k 20 --dtype int8, which the above does not ask for"
    )


def test_target_and_draft_of_one_name_are_two_files():
    setting = replace(SETTING, target="/a/x/m", draft="/b/x/m")
    assert [converted(setting, model, ".gguf") for model in ("/a/x/m", "/b/x/m")] == [
        "x-m.gguf",
        "x-m-draft.gguf",
    ]
    assert converted(SETTING, "draft", ".gguf") == "draft.gguf"
