"""Rows over caches of their own: families whose rows cannot share one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import foretoken
from census import build
from foretoken.errors import RefusedError
from foretoken.models.stock import packed, rowwise
from foretoken.models.stock.rowwise import ROWWISE_BACKEND, RowwiseModel
from foretoken.models.stock.selfcheck import check
from foretoken.models.stock.selfcheck import measure_deviation as deviation_of

BLOCKS = ["OpenAIGPTLMHeadModel", "RwkvForCausalLM", "LEDForConditionalGeneration"]
PROMPTS = [[3, 7, 11, 5, 9, 3, 7, 11], [4, 5, 6], [9, 8, 7, 6, 5, 9, 8, 7, 6, 5, 9, 8]]


@pytest.mark.parametrize(
    "name", [*BLOCKS, "T5GemmaForConditionalGeneration", "Qwen3NextForCausalLM"]
)
def test_rows_are_exact_over_their_own_caches(name: str) -> None:
    assert deviation_of(build(name), RowwiseModel(build(name)), rowwise.forward_as_generate) < 1e-5


def test_going_back_before_every_copy_reads_the_text_again() -> None:
    model = build("RwkvForCausalLM")
    rows = RowwiseModel(model)
    rows.start([PROMPTS[0]])
    for token in (4, 5, 6):
        rows.score([[token]], [1])
    rows.set_lengths([2])
    again = rows.score([[12, 13]], [2])[0]
    whole = rowwise.forward_as_generate(model, torch.tensor([[3, 7, 12, 13]]), None, 2)
    assert torch.allclose(again, whole, atol=1e-5)


def test_a_state_that_is_not_copied_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the same state for a row and what it goes back to."""
    monkeypatch.setattr(rowwise, "copy_cache", lambda kept: kept)
    with pytest.raises(RefusedError, match="is not exact over a cache per sequence"):
        check(build("Qwen3NextForCausalLM"), ROWWISE_BACKEND)


def test_a_crop_to_the_wrong_length_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: one token too few stays."""
    crop = rowwise.crop
    monkeypatch.setattr(rowwise, "crop", lambda kept, tokens: crop(kept, tokens + 1))
    with pytest.raises(RefusedError):
        check(build("BloomForCausalLM"), ROWWISE_BACKEND)


@pytest.mark.parametrize("draft", ["lookup", "none"])
def test_a_family_that_scores_single_tokens_is_left_to_transformers(
    draft: str, caplog: pytest.LogCaptureFixture
) -> None:
    """XLNet attends to a prompt both ways: a block of its text has other logits."""
    model: Any = build("XLNetLMHeadModel")
    reason = "so speculative decoding saves nothing; use transformers' own generate"
    for prepare in (foretoken.load, partial(foretoken.attach, strict=True)):
        with pytest.raises(RefusedError, match=reason):
            prepare(model, draft, runtime="transformers")
    with caplog.at_level("INFO", "foretoken"):
        assert foretoken.attach(model, draft, runtime="transformers") is None
    told = caplog.records[-1].getMessage()
    assert told.startswith("model.generate is left unchanged: xlnet") and reason in told
    assert "generate" not in vars(model)
    assert model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=2).shape == (1, 10)


def test_a_family_that_draws_its_logits_is_found() -> None:
    """Negative control: a forward is no reference, as it gives other logits each time."""
    model: Any = build("BloomForCausalLM")
    kind: Any = type(model)

    class Loose(kind):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits + 0.01 * torch.randn(output.logits.shape)
            return output

    with pytest.raises(RefusedError, match="differ by .* from a full forward; it scores"):
        check(Loose(model.config).eval(), ROWWISE_BACKEND)


def test_work_grows_with_the_text_alone(monkeypatch) -> None:
    """Also where nearly all draft tokens are rejected: tokens are not read again and again."""
    read: list[int] = []
    forward = RowwiseModel._forward

    def counted(self: RowwiseModel, row: Any, end: int, wanted: int) -> torch.Tensor:
        read.append(end - row.num_cached)
        return forward(self, row, end, wanted)

    monkeypatch.setattr(RowwiseModel, "_forward", counted)
    spec = foretoken.load(build("RwkvForCausalLM"), "uniform", runtime="transformers")
    read.clear()
    spec.generate([PROMPTS[0]], max_new_tokens=60, gamma=2)
    assert sum(read) < 7 * (len(PROMPTS[0]) + 60)


def test_states_that_are_kept_are_few() -> None:
    rows = RowwiseModel(build("Qwen3NextForCausalLM"))
    rows.start([PROMPTS[0]])
    for _ in range(2 * rowwise.MAX_SNAPSHOTS):
        rows.score([[3]], [0])
    assert len(rows.seqs[0].snapshots) == rowwise.MAX_SNAPSHOTS


def test_a_context_by_another_name() -> None:
    model = build("MptForCausalLM")
    model.config.max_seq_len = 20
    spec = foretoken.load(model, "none", runtime="transformers")
    (completion,) = spec.generate([PROMPTS[0]], max_new_tokens=40)
    assert spec.target.context == 20 and completion.finish_reason == "length"


def test_what_runs_is_packed(tmp_path, monkeypatch) -> None:
    """Layers are packed before a twin of the network is made."""
    monkeypatch.setattr(packed, "MIN_PACKED_ELEMENTS", 1)
    build("RwkvForCausalLM").save_pretrained(tmp_path)
    target: Any = foretoken.load(tmp_path, "none", runtime="transformers").target
    kinds = {type(part).__name__ for part in target.network.modules()}
    assert "PackedLinear" in kinds and "Linear" not in kinds
