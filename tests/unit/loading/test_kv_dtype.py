"""The precision of the target's keys and values, chosen by name: followed, or refused in a line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import foretoken
from foretoken.costing.stored_costs import make_identity
from foretoken.errors import InputError, RefusedError
from foretoken.models.native.model import NativeModel
from loads import refused
from tiny import byte_level, folder, llama, t5

pytestmark = pytest.mark.native
WIDE = {"hidden_size": 128, "intermediate_size": 192}
PROMPT = [3 + i % 60 for i in range(40)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("kv") / "target", llama(**WIDE), byte_level())


@pytest.fixture(scope="module")
def seq2seq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = t5(d_model=128, d_ff=192)
    return folder(tmp_path_factory.mktemp("kv") / "t5", model, byte_level())


def logits(model: NativeModel, prompt: list[int]) -> torch.Tensor:
    model.start([prompt])
    return model.score([[5]], [1]).clone()


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "stored"),
    [
        ("float32", "auto", "float32"),
        ("float32", "float16", "float16"),
        ("bfloat16", "float16", "float16"),
        ("int8", "auto", "float16"),
        ("int8", "float32", "float32"),
    ],
)
def test_keys_and_values_are_stored_in_it(target, dtype, kv_dtype, stored):
    spec = foretoken.load(target, "none", dtype=dtype, kv_dtype=kv_dtype)
    assert isinstance(spec.target, NativeModel) and spec.target.pool.dtype.name == stored
    other = "float16" if stored == "float32" else "float32"
    against = foretoken.load(target, "none", dtype=dtype, kv_dtype=other)
    assert isinstance(against.target, NativeModel)
    assert make_identity(spec.target) != make_identity(against.target)
    one, two = logits(spec.target, PROMPT), logits(against.target, PROMPT)
    tolerance = 0.2 if dtype == "int8" else 0.01  # int8: states may round to another integer
    assert not torch.equal(one, two) and (one - two).abs().max() < tolerance


def test_keys_and_values_of_an_encoder_decoder(seq2seq):
    spec = foretoken.load(seq2seq, "none", kv_dtype="float16")
    plain = foretoken.load(seq2seq, "none")
    assert spec.target.pool.dtype.name == spec.target.source_pool.dtype.name == "float16"
    one, two = (each.generate("It was", max_new_tokens=4)[0] for each in (spec, plain))
    assert len(one.tokens) == len(two.tokens) == 4


@pytest.mark.parametrize("draft", ["self:int8", "lookup"])
def test_greedy_output_is_that_of_the_model_with_this_cache(target, draft):
    plain = foretoken.load(target, "none", kv_dtype="float16")
    spec = foretoken.load(target, draft, kv_dtype="float16")
    for prompt in ("It was", PROMPT):
        one, two = (each.generate(prompt, max_new_tokens=20, gamma=3)[0] for each in (plain, spec))
        assert one.tokens == two.tokens


def test_a_model_in_memory_and_a_draft(target):
    spec = foretoken.load(llama(**WIDE), target, kv_dtype="float16", same_tokenizer=True)
    assert spec.target.runtime == "native" and spec.target.pool.dtype.name == "float16"
    assert spec.drafter.model.pool.dtype.name == "float32"
    in_memory = foretoken.load(llama(**WIDE), "none", kv_dtype="float32")
    assert in_memory.target.runtime == "transformers"


def test_torch_has_the_dtype_of_the_model(target):
    options = {"runtime": "transformers", "dtype": "float16", "kv_dtype": "float16"}
    assert foretoken.load(target, "none", **options).target.runtime == "transformers"
    says = "kv_dtype='float16' runs only on the native decoder, not on transformers; leave runtime"
    refused(RefusedError, says, target, "none", runtime="transformers", kv_dtype="float16")
    refused(InputError, "kv_dtype", target, "none", kv_dtype="int8")
