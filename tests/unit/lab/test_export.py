"""Commands for other systems, from plans."""

from __future__ import annotations

import ast
import json
import shlex
from dataclasses import replace

import pytest

from foretoken.errors import ForetokenError
from foretoken.lab.export import (
    LLAMA_CPP,
    OPENVINO_GENAI,
    SGLANG,
    VLLM,
    ExportSetting,
    Fact,
    System,
    converted,
    export,
)

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


@pytest.mark.parametrize("draft", ["self", "self:int8", "heads:h", "ngram:n", "copy", "uniform"])
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


SYSTEMS = (VLLM, SGLANG, LLAMA_CPP, OPENVINO_GENAI)
MODEL, LOOKUP = ExportSetting("a/t", "b/d", 4), ExportSetting("a/t", "lookup", 4)
PLAIN, SAMPLED = ExportSetting("a/t", "none", 0), ExportSetting("a/t", "b/d", 4, temperature=0.7)


def last(system: System, setting: ExportSetting) -> str:
    return export(system, setting).steps[-1]


def test_vllm():
    *command, config = shlex.split(last(VLLM, SAMPLED))
    assert command == ["vllm", "serve", "a/t", "--speculative-config"]
    assert json.loads(config) == {
        "method": "draft_model",
        "model": "b/d",
        "num_speculative_tokens": 4,
        "draft_sample_method": "probabilistic",
    }
    assert '"method": "ngram"' in last(VLLM, LOOKUP)
    assert last(VLLM, PLAIN) == "vllm serve a/t"
    versioned = ExportSetting("a/t", "none", 0, revision="v1")
    assert last(VLLM, versioned) == "vllm serve a/t --revision v1"


def test_sglang():
    assert last(SGLANG, MODEL) == (
        "python -m sglang.launch_server --model-path a/t --speculative-algorithm STANDALONE "
        "--speculative-draft-model-path b/d --speculative-num-steps 4 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 5"
    )
    assert last(SGLANG, LOOKUP).endswith(
        "--speculative-algorithm NGRAM --speculative-num-draft-tokens 5"
    )
    assert last(SGLANG, PLAIN) == "python -m sglang.launch_server --model-path a/t"


def test_llama_cpp():
    target, draft, server = export(LLAMA_CPP, SAMPLED).steps
    assert target == "python convert_hf_to_gguf.py a/t --outtype f32 --outfile a-t.gguf"
    assert draft == "python convert_hf_to_gguf.py b/d --outtype f32 --outfile b-d.gguf"
    assert server == (
        "llama-server --model a-t.gguf --model-draft b-d.gguf --spec-type draft-simple "
        "--spec-draft-n-max 4 --temp 0.7 --top-k 0 --top-p 1 --min-p 0"
    )
    (lookup,) = export(LLAMA_CPP, ExportSetting("/m/t.gguf", "lookup", 4)).steps
    assert lookup.startswith(
        "llama-server --model /m/t.gguf --spec-type ngram-simple --spec-ngram-simple-size-m 4 "
    )


def test_openvino_genai():
    script = export(OPENVINO_GENAI, MODEL).steps
    ast.parse("\n".join(script))
    assert script[1].startswith("# optimum-cli export openvino ")
    assert script[1].endswith(" --model b/d b-d-openvino")
    exactly = '"CPU", INFERENCE_PRECISION_HINT="f32"'
    assert f'draft_model=genai.draft_model("b-d-openvino", {exactly})' in script[3]
    assert "do_sample=False, num_assistant_tokens=4)" in script[4]
    looked = export(OPENVINO_GENAI, LOOKUP).steps
    assert "prompt_lookup=True" in looked[2] and "max_ngram_size=3" in looked[3]
    assert "temperature=0.7" in export(OPENVINO_GENAI, ExportSetting("t", "none", 0, 0.7)).steps[3]
    with pytest.raises(ForetokenError, match="temperature is 0.7: .* does not keep the target's"):
        export(OPENVINO_GENAI, SAMPLED)


@pytest.mark.parametrize("system", [LLAMA_CPP, OPENVINO_GENAI], ids=lambda system: system.name)
def test_a_draft_without_a_tokenizer_gets_the_targets(system: System, tmp_path):
    """In a copy: its own folder stays as it is."""
    (tmp_path / "config.json").touch()
    setting = ExportSetting("t", str(tmp_path), 4)
    copy, *steps = export(system, setting).steps
    folder = f"{tmp_path.parent.name}-{tmp_path.name}-with-tokenizer"
    command = f"mkdir -p {folder} && cp {tmp_path}/* t/*tokenizer* {folder}"
    assert copy.removeprefix("# ") == command
    assert any(folder in step for step in steps)
    assert not any(str(tmp_path) in step for step in steps)
    (tmp_path / "tokenizer.json").touch()
    assert not any("cp " in step for step in export(system, setting).steps)


def test_a_folder_that_is_converted_is_read_as_it_is(tmp_path):
    (tmp_path / "openvino_model.xml").touch()
    script = export(OPENVINO_GENAI, ExportSetting(str(tmp_path), "lookup", 4)).steps
    assert script[0].startswith("import") and f'LLMPipeline("{tmp_path}"' in script[1]


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_facts_name_their_sources(system: System):
    for setting in (MODEL, LOOKUP):
        exported = export(system, setting)
        assert exported.distribution and exported.lacks
        for fact in (*exported.distribution, *exported.lacks):
            assert "/" in fact.source and not fact.text.endswith(".")


def test_what_was_seen_in_other_systems_is_told():
    def told(system: System, setting: ExportSetting) -> str:
        exported = export(system, setting)
        return "\n".join(
            f"{fact.text} [{fact.source}]" for fact in (*exported.distribution, *exported.lacks)
        )

    assert "BPE pre-tokenizer was not recognized" in told(LLAMA_CPP, MODEL)
    assert "--spec-draft-sampling probabilistic" in told(LLAMA_CPP, MODEL)
    assert "on CPU, XPU and ROCm every text is greedy" in told(SGLANG, MODEL)
    assert "[sglang/srt/speculative/standalone_worker_v2.py]" in told(SGLANG, MODEL)
    assert "CPU and XPU" in told(SGLANG, LOOKUP)
    assert "vllm/v1/worker/gpu/spec_decode/rejection_sampler_utils.py" in told(VLLM, MODEL)
    assert "drafts with a vocabulary of another size are refused" in told(VLLM, MODEL)
    assert "older runner (V1)" in told(VLLM, MODEL)
