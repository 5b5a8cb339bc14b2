"""A target over several processes, as it is loaded: what is refused before one is started."""

from __future__ import annotations

from pathlib import Path

import pytest

import foretoken
from foretoken.errors import InputError, RefusedError
from foretoken.models.families import build
from foretoken.models.parallel import ranks
from tiny import byte_level, folder, llama


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*args: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(ranks, "start", started)


def test_a_family_without_a_plan_is_refused_by_name(tmp_path: Path) -> None:
    target = folder(tmp_path / "target", build("GPT-2"))
    with pytest.raises(RefusedError, match=r"is 2, but gpt2 \(GPT2LMHeadModel\) has no .* plan"):
        foretoken.load(target, "none", tensor_parallel=2)


def test_heads_that_do_not_divide(tmp_path: Path) -> None:
    target = folder(tmp_path / "target", llama(64))
    with pytest.raises(RefusedError, match="has 2 key-value heads, .* give 1 or 2"):
        foretoken.load(target, "none", tensor_parallel=4)


def test_a_target_in_memory_and_drafts_that_read_it(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="in this process's memory, .* give its folder"):
        foretoken.load(llama(64), "none", tensor_parallel=2)
    target = folder(tmp_path / "target", llama(320), byte_level())
    with pytest.raises(RefusedError, match="reads the target's own keys and values"):
        foretoken.load(target, "self:int8", tensor_parallel=2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "meta"}, "device 'meta'"),
        ({"runtime": "openvino"}, "without runtime='openvino'"),
        ({"runtime": "graphs"}, "without runtime='graphs'"),
        ({"dtype": "int8"}, "without dtype='int8'"),
        ({"kv_dtype": "int8"}, "without kv_dtype='int8'"),
        ({"exact_shapes": True}, "without exact_shapes=True"),
        ({"trust_remote_code": True}, "without trust_remote_code=True"),
    ],
)
def test_options_that_several_processes_cannot_follow(
    options: dict[str, object], says: str
) -> None:
    with pytest.raises((InputError, RefusedError), match=says):
        foretoken.load("a/b", tensor_parallel=2, **options)  # pyright: ignore


@pytest.mark.parametrize("value", [0, -1, True, "2", 2.0])
def test_an_invalid_number(value: object) -> None:
    with pytest.raises(InputError, match="tensor_parallel is .*; give "):
        foretoken.load("a/b", tensor_parallel=value)  # pyright: ignore
