"""`foretoken export` as a user meets it; the commands are tested in tests/unit/lab/export."""

from __future__ import annotations

import json
from pathlib import Path

from console import Run, mistake
from measurements import document

GIVEN = ("--target", "a/t", "--draft", "b/d", "--gamma", 4)


def test_a_command_and_what_is_to_be_known_of_it(console: Run):
    result = console("export", "vllm", *GIVEN)
    assert result.code == 0 and result.out.count("\n") == 1  # to be run, or piped
    assert result.out.startswith("vllm serve a/t --speculative-config '{")
    for says in ("vLLM 0.33.0, for a/t with draft b/d, gamma 4", "min_p is refused", "[vllm/"):
        assert says in result.err
    report = json.loads(console("export", "sglang", *GIVEN, "--json").out)
    assert report["system"] == "SGLang" and "STANDALONE" in report["steps"][0]
    assert {"text", "source"} == set(report["law"][0])
    shipped = console("export", "llama.cpp", "--gamma", 2)
    assert "--model-draft assets-draft-with-tokenizer.gguf" in shipped.out


def test_a_plan_is_exported(console: Run, tmp_path: Path):
    path = tmp_path / "m.json"
    path.write_text(json.dumps(document([0.9, 0.9], 0.1, draft="b/d", temperature=1.0)))
    gamma = json.loads(console("measure", path, "--json").out)["gamma"]
    assert gamma > 0
    result = console("export", "vllm", path)
    assert f'"num_speculative_tokens": {gamma}, "draft_sample_method"' in result.out
    assert "for target with draft b/d" in result.err


def test_mistakes_are_one_line(console: Run, tmp_path: Path):
    (tmp_path / "config.json").write_text('{"is_encoder_decoder": true}')
    for arguments, message in (
        (("trt", *GIVEN), "system is 'trt'; give one of vllm, sglang"),
        (("vllm", "--target", "a/t", "--gamma", 4), "a target of yours needs --draft"),
        (("vllm", "--target", "a/t", "--draft", "b/d"), "give --gamma, as foretoken measure picks"),
        (("vllm", "--target", tmp_path, "--draft", "b/d", "--gamma", 1), "an encoder-decoder"),
        (("vllm", "--target", "a/t", "--draft", "none", "--gamma", 3), "gamma is 3 with --draft"),
        (("vllm", "m.json", *GIVEN), "not both"),
        (("vllm", tmp_path / "m.json"), "there is no"),
    ):
        mistake(console("export", *arguments), message)
