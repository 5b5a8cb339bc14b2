"""`foretoken export vllm`: the command, the speculative config, and refusals."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from console import Run, mistake
from foretoken.measurement.plan import BENCH_FILE_FORMAT, PlanOptions, choose_plan

GIVEN = ("--target", "a/t", "--draft", "b/d", "--gamma", 4)
PLAIN = ("--target", "a/t", "--draft", "none")


def exported(console: Run, *arguments: object) -> tuple[list[str], Any]:
    """The words of the command, and its speculative config."""
    result = console("export", "vllm", *arguments)
    assert result.code == 0 and result.out.count("\n") == 1  # to be run, or piped
    *words, last = shlex.split(result.out)
    if "--speculative-config" not in words:
        return [*words, last], None
    return words[:-1], json.loads(last)


def test_a_model_as_draft(console: Run):
    words, config = exported(console, *GIVEN)
    assert words == ["vllm", "serve", "a/t"]
    expected = {"method": "draft_model", "model": "b/d", "num_speculative_tokens": 4}
    assert config == expected
    _, sampled = exported(console, *GIVEN, "--temperature", 0.7)
    assert sampled == expected | {"draft_sample_method": "probabilistic"}
    assert "vLLM chooses the dtype itself" in console("export", "vllm", *GIVEN).err
    report = json.loads(console("export", "vllm", *GIVEN, "--json").out)
    assert report["speculative_config"] == expected and report["setting"]["gamma"] == 4
    assert shlex.split(report["command"])[:3] == words


def test_look_up_the_targets_own_layer_and_none(console: Run):
    _, config = exported(console, *GIVEN, "--draft", "lookup")
    assert (config["method"], config["num_speculative_tokens"]) == ("ngram", 4)
    _, config = exported(console, *GIVEN, "--draft", "mtp")
    assert config == {"method": "mtp", "num_speculative_tokens": 4}
    assert exported(console, *PLAIN) == (["vllm", "serve", "a/t"], None)


def test_a_choice_among_drafts_is_refused(console: Run):
    words = [*GIVEN, "--draft", "lookup+b/d+self:int4"]
    mistake(console("export", "vllm", *words), "give one of 'b/d+self:int4'")


def test_a_plan_is_exported_with_its_revisions(console: Run, tmp_path: Path):
    spread = {"median": 1.5, "q1": 1.4, "q3": 1.6, "n": 5}
    rows = [{"draft": "b/d", "gamma": 3, "batch": 1, "speedup": spread, "others": None}]
    load = {"target": "target", "revision": "v1", "draft_revision": "v2"}
    path, measured = tmp_path / "b.json", PlanOptions(None, "block", 1.0, 0, 1.0)

    def write(**more: Any) -> None:
        best = asdict(choose_plan(rows, measured, load | more))
        path.write_text(json.dumps({"format": BENCH_FILE_FORMAT, "best": best}))

    write(dtype="int8")
    said = "vLLM's command leaves out these options of the benchmark: --dtype int8\n"
    assert said in console("export", "vllm", path).err
    write(adapter="a/lora")
    mistake(console("export", "vllm", path), "measured target with the adapter a/lora, which")
    write(dtype="bfloat16")
    assert "leaves out" not in console("export", "vllm", path).err
    words, config = exported(console, path)
    assert words == ["vllm", "serve", "target", "--revision", "v1"]
    assert config == {
        "method": "draft_model",
        "model": "b/d",
        "num_speculative_tokens": 3,
        "revision": "v2",
        "draft_sample_method": "probabilistic",
    }


def test_a_gguf_file_is_named(console: Run, tmp_path: Path):
    file = tmp_path / "model" / "m.gguf"
    file.parent.mkdir()
    file.write_bytes(b"GGUF" + bytes(20))
    for target in (file, file.parent):
        words, _ = exported(console, "--target", target, "--draft", "none")
        assert words == ["vllm", "serve", str(file)]
