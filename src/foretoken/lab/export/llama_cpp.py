"""llama.cpp's server, as its own list of options and long-standing files read."""

from __future__ import annotations

import shlex

from foretoken.lab.export.base import ExportSetting, Fact, System, converted, with_tokenizer

OPTIONS = "https://github.com/ggml-org/llama.cpp/blob/00dc8057ab/tools/server/README.md"


def steps(setting: ExportSetting) -> list[str]:
    copied, setting = with_tokenizer(setting)

    def file(model: str) -> str:
        return model if model.endswith(".gguf") else converted(setting, model, ".gguf")

    models = [setting.target, *([setting.draft] if setting.kind == "model" else [])]
    conversions = [
        ["python", "convert_hf_to_gguf.py", model, "--outtype", "f32", "--outfile", file(model)]
        for model in models
        if not model.endswith(".gguf")
    ]
    command = ["llama-server", "--model", file(setting.target)]
    if setting.kind == "model":
        command += ["--model-draft", file(setting.draft), "--spec-type", "draft-simple"]
        command += ["--spec-draft-n-max", str(setting.gamma)]
    elif setting.kind == "lookup":
        command += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-m", str(setting.gamma)]
    # its own defaults are another law: temperature 0.8, top-k 40, top-p 0.95, min-p 0.05
    command += ["--temp", f"{setting.temperature:g}"]
    command += ["--top-k", "0", "--top-p", "1", "--min-p", "0"]
    return [*copied, *(shlex.join(each) for each in (*conversions, command))]


LLAMA_CPP = System(
    name="llama.cpp",
    version="at 00dc8057ab",
    flags=OPTIONS,
    steps=steps,
    converts=True,
    law=(
        Fact(
            "exact but for rounding: the request's own samplers draw every token, and a guess is "
            "kept where it is that token; the draft guesses its likeliest one and q is not used, "
            "so fewer are kept above temperature 0",
            "https://github.com/ggml-org/llama.cpp/pull/10455",
            "model",
        ),
        Fact(
            "build 11434 can draw guesses from q and weigh them by it, if it is told "
            "--spec-draft-sampling probabilistic; build 10434 has no such option",
            "common/arg.cpp and common/sampling.cpp of its repository",
            "model",
        ),
        Fact(
            "exact but for rounding: a copied guess is kept where the request's own samplers draw "
            "it",
            "https://github.com/ggml-org/llama.cpp/pull/10455",
            "lookup",
        ),
        Fact(
            "of the server only: its example llama-speculative is biased above temperature 0",
            "examples/speculative/speculative.cpp of its repository",
            "model",
        ),
    ),
    lacks=(
        Fact(
            "encoder-decoders such as T5 are not decoded speculatively",
            "https://github.com/ggml-org/llama.cpp/blob/master/docs/speculative.md",
        ),
        Fact(
            "it reads GGUF files, which its converter makes; keys and values are float16 unless "
            "--cache-type-k and --cache-type-v say otherwise",
            OPTIONS,
        ),
        Fact(
            "its converter knows tokenizers of byte-level BPE by a list: one that was trained anew "
            "is refused (BPE pre-tokenizer was not recognized) until it is entered there",
            "conversion/base.py of its repository",
        ),
        Fact(
            "gamma is the most for all steps: it is not chosen from what the rows have kept",
            OPTIONS,
        ),
        Fact("no lenience", "https://github.com/ggml-org/llama.cpp/pull/10455"),
        Fact(
            "a draft's vocabulary may differ in size by 128 at most, and not in its texts",
            "https://github.com/ggml-org/llama.cpp/pull/3812",
            "model",
        ),
        Fact(
            "it copies behind 12 equal tokens (--spec-ngram-simple-size-n), not behind any number",
            OPTIONS,
            "lookup",
        ),
    ),
)
