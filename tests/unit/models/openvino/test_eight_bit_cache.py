"""Keys and values in eight bits: another model, but one and the same whatever the passes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import foretoken
from foretoken.errors import InputError, RefusedError
from foretoken.models.openvino.paged import PagedModel
from tiny import byte_level, folder, llama, t5

pytestmark = pytest.mark.openvino
TEXT = list(range(7, 77))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = llama(hidden_size=128, intermediate_size=192)
    return folder(tmp_path_factory.mktemp("kv") / "target", model, byte_level())


def paged(target: Path, kv_dtype: str | None) -> PagedModel:
    model = foretoken.load(target, "none", kv_dtype=kv_dtype).target
    assert isinstance(model, PagedModel)
    return model


def test_a_distribution_does_not_depend_on_passes_or_on_draft_tokens_that_were_rejected(target):
    model = paged(target, "int8")
    model.start([TEXT[:40]])
    whole = model.score([TEXT[40:60]], [20])[0].clone()
    model.set_lengths([40])
    model.score([[300, 301, 302, 303, 304]], [1])  # other tokens in the same places
    model.set_lengths([40])
    single = torch.cat([model.score([[token]], [1])[0].clone() for token in TEXT[40:60]])
    assert torch.allclose(whole, single, atol=2e-5, rtol=1e-4)
    wide = paged(target, None)
    wide.start([TEXT[:40]])
    assert not torch.allclose(whole, wide.score([TEXT[40:60]], [20])[0], atol=1e-4)


def test_it_takes_a_third_of_the_memory_and_is_another_model(target):
    small, wide = paged(target, "int8"), paged(target, None)
    assert small.token_bytes < wide.token_bytes / 2 and small.identity != wide.identity


@pytest.mark.parametrize("draft", ["lookup", "self", "self:0"])
def test_draft_tokens_change_no_text(target, draft):
    prompts, options = ["It was", "the first day of the"], {"max_new_tokens": 40}
    plain = foretoken.load(target, "none", kv_dtype="int8").generate(prompts, **options)
    spec = foretoken.load(target, draft, kv_dtype="int8")
    for gamma in (1, 4, None):
        completions = spec.generate(prompts, gamma=gamma, **options)
        assert [each.tokens for each in completions] == [each.tokens for each in plain]


def test_what_has_no_pages_refuses(target, tmp_path):
    seq2seq = folder(tmp_path / "t5", t5(), byte_level())
    with pytest.raises(RefusedError, match="kv_dtype='int8' needs a cache in pages"):
        foretoken.load(seq2seq, "none", kv_dtype="int8")
    foretoken.load(target, "none", kv_dtype="int8")  # whose conversion is kept
    for runtime in ("transformers", "native"):
        with pytest.raises(RefusedError, match="kv_dtype='int8' runs on OpenVINO only"):
            foretoken.load(target, "none", kv_dtype="int8", runtime=runtime)
    with pytest.raises(InputError, match="kv_dtype is 'int4'; give one of int8"):
        foretoken.load(target, "none", kv_dtype="int4")
