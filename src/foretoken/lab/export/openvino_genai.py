"""OpenVINO GenAI, as its sources read; its pipelines have no command line, so this is Python."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from foretoken.errors import RefusedError
from foretoken.lab.export.base import ExportSetting, Fact, System, converted, with_tokenizer

NGRAM = 3  # tokens of a match, as in its own example


def steps(setting: ExportSetting) -> list[str]:
    """Lines of a script, the conversions as comments. RefusedError above temperature 0, where its
    rule is wrong."""
    if setting.temperature and setting.kind != "plain":
        raise RefusedError(
            f"temperature is {setting.temperature:g}: above 0 OpenVINO GenAI's speculative "
            "sampling does not keep the target's law; give --temperature 0, or --draft none"
        )
    copied, setting = with_tokenizer(setting)
    # its own default is bfloat16 on processors that can: another law
    place = '"CPU", INFERENCE_PRECISION_HINT="f32"'
    target = json.dumps(_folder(setting, setting.target))
    draft = f"genai.draft_model({json.dumps(_folder(setting, setting.draft))}, {place})"
    more = {"plain": "", "model": f", draft_model={draft}", "lookup": ", prompt_lookup=True"}
    how = {
        "plain": "",
        "model": f", num_assistant_tokens={setting.gamma}",
        "lookup": f", num_assistant_tokens={setting.gamma}, max_ngram_size={NGRAM}",
    }
    law = "do_sample=False"
    if setting.temperature:
        law = f"do_sample=True, temperature={setting.temperature:g}, top_k=0"
    models = [setting.target, *([setting.draft] if setting.kind == "model" else [])]
    convert = "optimum-cli export openvino --task text-generation-with-past --weight-format fp32"
    return [
        *(f"# {step}" for step in copied),
        *(
            f"# {convert} --model {shlex.quote(model)} {shlex.quote(_folder(setting, model))}"
            for model in models
            if _folder(setting, model) != model
        ),
        "import openvino_genai as genai",
        f"pipeline = genai.LLMPipeline({target}, {place}{more[setting.kind]})",
        f"config = genai.GenerationConfig(max_new_tokens=64, {law}{how[setting.kind]})",
        'print(pipeline.generate("It was", config))',
    ]


def _folder(setting: ExportSetting, model: str) -> str:
    """A model's converted folder; one that is converted is itself."""
    if (Path(model) / "openvino_model.xml").exists():
        return model
    return converted(setting, model, "-openvino")


OPENVINO_GENAI = System(
    name="OpenVINO GenAI",
    version="2026.4.1 (sources at da1db864d)",
    flags="https://openvinotoolkit.github.io/openvino.genai/docs/samples/python/text_generation",
    steps=steps,
    converts=True,
    law=(
        Fact(
            "greedy texts are exact but for rounding: a guess is kept where it is the likeliest "
            "token",
            "src/cpp/src/sampling/sampler.cpp of its repository",
        ),
        Fact(
            "sampled texts are not: the ratio is of two different tokens' probabilities, and a "
            "rejected guess is replaced from the position behind it",
            "src/cpp/src/sampling/sampler.cpp of its repository",
        ),
    ),
    lacks=(
        Fact(
            "encoder-decoders are not decoded speculatively",
            "site/docs/concepts/optimization-techniques/speculative-decoding.mdx of its repository",
        ),
        Fact(
            "it reads folders that `optimum-cli export openvino` makes (of optimum-intel)",
            "https://openvinotoolkit.github.io/openvino.genai/docs/samples/python/text_generation",
        ),
        Fact(
            "it computes in bfloat16 on processors that can, unless INFERENCE_PRECISION_HINT is "
            "f32, as above",
            "https://docs.openvino.ai/2025/openvino-workflow/running-inference/"
            "optimize-inference/precision-control.html",
        ),
        Fact(
            "gamma is one number for all steps: it is not chosen from what the rows have kept",
            "src/cpp/src/sampling/sampler.cpp of its repository",
        ),
        Fact("no lenience", "src/cpp/src/sampling/sampler.cpp of its repository"),
        Fact(
            "its stateful pipelines take one text at a time; its ContinuousBatchingPipeline takes "
            "several",
            "src/cpp/src/speculative_decoding/stateful/fast_draft_strategy.cpp of its repository",
            "model",
        ),
        Fact(
            "drafts with another tokenizer are refused",
            "src/cpp/src/speculative_decoding of its repository",
            "model",
        ),
        Fact(
            f"a match is of at most {NGRAM} tokens (max_ngram_size), here of any length",
            "https://openvinotoolkit.github.io/openvino.genai/docs/samples/python/text_generation",
            "lookup",
        ),
    ),
)
