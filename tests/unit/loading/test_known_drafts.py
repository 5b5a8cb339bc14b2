"""Names of published drafts: whose they are, and which of them the log mentions."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from huggingface_hub import constants

import foretoken
from foretoken.loading import known_drafts
from foretoken.loading.published_drafts import SUPPORTED_KINDS
from tiny import byte_level, folder, llama


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "no-hub"))


def test_every_known_draft_has_a_supported_kind_and_an_owner() -> None:
    for target, drafts in known_drafts.KNOWN_DRAFTS.items():
        assert known_drafts.split_target_name(target) == known_drafts.split_name(target)
        assert drafts and len({*drafts}) == len(drafts)
        for draft in drafts:
            assert draft.count("/") == 1 and known_drafts.parse_kind(draft) in SUPPORTED_KINDS


@pytest.mark.parametrize(
    ("target", "first"),
    [
        ("Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.eagle3"),
        ("Qwen/Qwen3-8B-FP8", "RedHatAI/Qwen3-8B-speculator.eagle3"),
        ("unsloth/Qwen3-8B-GGUF:Qwen3-8B-Q4_K_M.gguf", "RedHatAI/Qwen3-8B-speculator.eagle3"),
        ("/models/qwen3-8b.Q8_0.gguf", "RedHatAI/Qwen3-8B-speculator.eagle3"),
        ("google/gemma-4-E4B-it", "google/gemma-4-E4B-it-assistant"),
        ("Qwen/Qwen3.8-27B-FP8", "z-lab/Qwen3.8-27B-DFlash2"),
        ("Qwen/Qwen3-8B-Base", None),
        ("Qwen/Qwen3-4B-Instruct-2507", None),
        ("novels", None),
        ("smollm2", None),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2"),
        ("HuggingFaceTB/SmolLM2-360M-Instruct", None),
    ],
)
def test_a_target_is_found_by_its_name(target: str, first: str | None) -> None:
    assert next(iter(known_drafts.list_known_drafts(target)), None) == first


def test_the_log_names_a_draft_if_none_is_given(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder(tmp_path / "Qwen3-8B", llama(320, num_hidden_layers=1), byte_level())
    with caplog.at_level(logging.INFO, "foretoken.loading.load"):
        foretoken.load(path, runtime="transformers")
        foretoken.load(path, "lookup", runtime="transformers")
        foretoken.load("novels")
    lines = [each.getMessage() for each in caplog.records if "is known" in each.getMessage()]
    assert lines == [
        "a draft for Qwen3-8B is known: --draft RedHatAI/Qwen3-8B-speculator.eagle3; foretoken "
        f"drafts {path} lists more"
    ]
