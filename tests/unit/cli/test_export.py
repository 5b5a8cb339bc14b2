"""`foretoken export` as a user meets it: commands, facts and refusals, system by system."""

from __future__ import annotations

import ast
import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from console import Run, mistake
from foretoken.cli.export import SYSTEMS
from foretoken.measurement.plan import FORMAT, choose

GIVEN = ("--target", "a/t", "--draft", "b/d", "--gamma", 4)
LOOKUP = (*GIVEN, "--draft", "lookup")
PLAIN = ("--target", "a/t", "--draft", "none")
SAMPLED = (*GIVEN, "--temperature", 0.7)


def steps(console: Run, *arguments: object) -> list[str]:
    result = console("export", *arguments)
    assert result.code == 0
    return result.out.splitlines()


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
    assert "--model-draft draft.gguf" in shipped.out


def benchmarked(folder: Path, temperature: float = 0.0, **load: Any) -> Path:
    """A file of `foretoken bench` whose fastest draft is b/d with gamma 3."""
    spread = {"median": 1.5, "q1": 1.4, "q3": 1.6, "n": 5}
    rows = [{"draft": "b/d", "gamma": 3, "batch": 1, "speedup": spread}]
    best = asdict(choose(rows, temperature, {"target": "target", **load}))
    (folder / "b.json").write_text(json.dumps({"format": FORMAT, "best": best}))
    return folder / "b.json"


def test_a_plan_is_exported(console: Run, tmp_path: Path):
    path = benchmarked(tmp_path, 1.0)
    result = console("export", "vllm", path)
    assert '"num_speculative_tokens": 3, "draft_sample_method"' in result.out
    assert "for target with draft b/d" in result.err


def test_vllm(console: Run):
    (line,) = steps(console, "vllm", *SAMPLED)
    *command, config = shlex.split(line)
    assert command == ["vllm", "serve", "a/t", "--speculative-config"]
    assert json.loads(config) == {
        "method": "draft_model",
        "model": "b/d",
        "num_speculative_tokens": 4,
        "draft_sample_method": "probabilistic",
    }
    assert '"method": "ngram"' in steps(console, "vllm", *LOOKUP)[0]
    assert steps(console, "vllm", *PLAIN) == ["vllm serve a/t"]


@pytest.mark.parametrize("of", ["revision", "draft_revision"])
def test_a_revision_is_refused_by_a_system_that_converts(console: Run, tmp_path: Path, of: str):
    path = benchmarked(tmp_path, **{of: "v1"})
    told = "revision v1 of a model on the hub: llama.cpp reads converted files"
    mistake(console("export", "llama.cpp", path), told)


def test_revisions_are_passed_on(console: Run, tmp_path: Path):
    path = benchmarked(tmp_path, revision="v1", draft_revision="v2")
    (line,) = steps(console, "vllm", path)
    assert line.startswith("vllm serve target --revision v1 --spec") and '"revision": "v2"' in line
    (line,) = steps(console, "sglang", path)
    assert "--model-path target --revision v1 " in line
    assert "--speculative-draft-model-path b/d --speculative-draft-model-revision v2 " in line


def test_what_was_measured_and_is_not_asked_for_is_told_first(console: Run, tmp_path: Path):
    path = benchmarked(tmp_path, 0.5, dtype="int8", kv_dtype="int8")
    first = json.loads(console("export", "vllm", path, "--json").out)["lacks"][0]["text"]
    flags = "--dtype int8 --kv-dtype int8"
    assert first == f"it was measured with {flags}, which the above does not ask for"


def test_files_that_are_converted_stay_as_they_are(console: Run, tmp_path: Path):
    (line,) = steps(console, "llama.cpp", "--target", "/m/t.gguf", *LOOKUP[2:])
    assert line.startswith("llama-server --model /m/t.gguf --spec-type ngram-simple ")
    (tmp_path / "openvino_model.xml").touch()
    script = steps(console, "openvino-genai", "--target", tmp_path, *LOOKUP[2:])
    assert script[0].startswith("import") and f'LLMPipeline("{tmp_path}"' in script[1]


@pytest.mark.parametrize("system", ["llama.cpp", "openvino-genai"])
def test_a_draft_without_a_tokenizer_gets_the_targets(console: Run, tmp_path: Path, system: str):
    """In a copy: its own folder stays as it is."""
    target, draft = tmp_path / "t", tmp_path / "d"
    for each in (target, draft):
        each.mkdir()
        (each / "config.json").touch()
    (target / "tokenizer.json").touch()
    pair = ("--target", target, "--draft", draft, "--gamma", 4)
    _, copy, convert, *_ = steps(console, system, *pair)
    made = (
        f"mkdir -p draft-with-tokenizer && cp {draft}/* {target}/*tokenizer* draft-with-tokenizer"
    )
    assert copy.removeprefix("# ") == made and " draft-with-tokenizer " in convert
    (draft / "tokenizer.json").touch()
    assert not any("cp " in step for step in steps(console, system, *pair))


def test_sglang(console: Run):
    start = "python -m sglang.launch_server --model-path a/t"
    assert steps(console, "sglang", *GIVEN) == [
        f"{start} --speculative-algorithm STANDALONE --speculative-draft-model-path b/d "
        "--speculative-num-steps 4 --speculative-eagle-topk 1 --speculative-num-draft-tokens 5"
    ]
    assert steps(console, "sglang", *LOOKUP) == [
        f"{start} --speculative-algorithm NGRAM --speculative-num-draft-tokens 5"
    ]
    assert steps(console, "sglang", *PLAIN) == [start]


def test_llama_cpp(console: Run):
    target, draft, server = steps(console, "llama.cpp", *SAMPLED)
    assert target == "python convert_hf_to_gguf.py a/t --outtype f32 --outfile target.gguf"
    assert draft == "python convert_hf_to_gguf.py b/d --outtype f32 --outfile draft.gguf"
    assert server == (
        "llama-server --model target.gguf --model-draft draft.gguf --spec-type draft-simple "
        "--spec-draft-n-max 4 --temp 0.7 --top-k 0 --top-p 1 --min-p 0"
    )
    assert "--spec-ngram-simple-size-m 4" in steps(console, "llama.cpp", *LOOKUP)[-1]
    assert len(steps(console, "llama.cpp", *PLAIN)) == 2


def test_openvino_genai(console: Run):
    script = steps(console, "openvino-genai", *GIVEN)
    ast.parse("\n".join(script))
    assert script[1].startswith("# optimum-cli export openvino ")
    assert script[1].endswith(" --model b/d draft-openvino")
    exactly = '"CPU", INFERENCE_PRECISION_HINT="f32"'
    assert f'draft_model=genai.draft_model("draft-openvino", {exactly})' in script[3]
    assert "do_sample=False, num_assistant_tokens=4)" in script[4]
    looked = steps(console, "openvino-genai", *LOOKUP)
    assert "prompt_lookup=True" in looked[2] and "max_ngram_size=3" in looked[3]
    plain = steps(console, "openvino-genai", *PLAIN, "--temperature", 0.7)
    assert "do_sample=True, temperature=0.7, top_k=0)" in plain[3]
    told = "temperature is 0.7: above 0 OpenVINO GenAI's speculative sampling does not keep"
    mistake(console("export", "openvino-genai", *SAMPLED), told)


def test_names_are_quoted(console: Run):
    for system in SYSTEMS:
        lines = steps(console, system, "--target", "a t", "--draft", "b'd", "--gamma", 2)
        words = [word for line in lines for word in shlex.split(line.removeprefix("# "))]
        assert "a t" in words and any("b'd" in word for word in words)


@pytest.mark.parametrize("system", SYSTEMS)
def test_facts_are_those_of_the_kind_of_draft_and_name_their_sources(console: Run, system: str):
    def told(*setting: object) -> dict[str, Any]:
        return json.loads(console("export", system, *setting, "--json").out)

    model, lookup, plain = told(*GIVEN), told(*LOOKUP), told(*PLAIN)
    for each in (model, lookup):
        assert each["law"] and each["lacks"]
        for fact in (*each["law"], *each["lacks"]):
            assert "/" in fact["source"] and not fact["text"].endswith(".")
    assert model["lacks"] != lookup["lacks"]
    shared = [fact for fact in model["lacks"] if fact in lookup["lacks"]]
    assert plain["law"] == [] and plain["lacks"] == shared  # where none is verified


def test_what_was_seen_in_other_systems_is_told(console: Run):
    def told(system: str) -> str:
        return console("export", system, *GIVEN).err

    assert "BPE pre-tokenizer was not recognized" in told("llama.cpp")
    assert "--spec-draft-sampling probabilistic" in told("llama.cpp")
    assert "on CPU, XPU and ROCm every text is greedy" in told("sglang")
    assert "drafts with a vocabulary of another size are refused" in told("vllm")


@pytest.mark.parametrize("draft", ["self", "self:0-3", "heads:h", "ngram:n", "copy", "uniform"])
def test_drafts_of_this_package_are_refused(console: Run, draft: str):
    told = f"draft {draft} exists in foretoken only; give the folder of a model"
    mistake(console("export", "vllm", *GIVEN, "--draft", draft), told)


def test_mistakes_are_one_line(console: Run, tmp_path: Path):
    (tmp_path / "config.json").write_text('{"is_encoder_decoder": true}')
    for arguments, message in (
        (("trt", *GIVEN), "system is 'trt'; give one of vllm, sglang"),
        (("vllm", "--target", "a/t", "--gamma", 4), "a target of yours needs --draft"),
        (("vllm", "--target", "a/t", "--draft", "b/d"), "give --gamma, as foretoken bench picks"),
        (("vllm", "--target", tmp_path, "--draft", "b/d", "--gamma", 1), "an encoder-decoder"),
        (("vllm", "--target", "a/t", "--draft", "none", "--gamma", 3), "gamma is 3 with --draft"),
        (("vllm", *GIVEN, "--gamma", -1), "gamma is -1 with --draft b/d; give 1 or more"),
        (("vllm", *GIVEN, "--temperature", "nan"), "temperature is nan"),
        (("vllm", *GIVEN, "--draft", ""), "draft is empty; give a folder or a hub id"),
        (("vllm", "m.json", *GIVEN), "not both"),
        (("vllm", tmp_path / "m.json"), "there is no"),
    ):
        mistake(console("export", *arguments), message)


def test_a_gguf_file_is_named_or_refused(console: Run, tmp_path: Path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "m.gguf").write_bytes(b"GGUF" + bytes(20))
    for target in (folder, folder / "m.gguf"):
        (line,) = steps(console, "llama.cpp", "--target", target, "--draft", "none")
        assert f"--model {folder / 'm.gguf'}" in line
        refused = console("export", "openvino-genai", "--target", target, "--draft", "none")
        assert refused.code == 2 and "m.gguf is a GGUF file, which the converter" in refused.err
