"""SGLang, as its released wheel reads."""

from __future__ import annotations

import shlex

from foretoken.lab.export.base import ExportSetting, Fact, System


def steps(setting: ExportSetting) -> list[str]:
    command = ["python", "-m", "sglang.launch_server", "--model-path", setting.target]
    if setting.revision is not None:
        command += ["--revision", setting.revision]
    verified = str(setting.gamma + 1)  # the last token counts among those that are verified
    if setting.kind == "lookup":
        command += ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", verified]
    elif setting.kind == "model":
        command += ["--speculative-algorithm", "STANDALONE"]
        command += ["--speculative-draft-model-path", setting.draft]
        if setting.draft_revision is not None:
            command += ["--speculative-draft-model-revision", setting.draft_revision]
        command += ["--speculative-num-steps", str(setting.gamma)]
        command += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", verified]
    return [shlex.join(command)]


SGLANG = System(
    name="SGLang",
    version="0.5.23",
    flags="https://docs.sglang.io/docs/advanced_features/speculative_decoding.md",
    steps=steps,
    law=(
        Fact(
            "on CUDA exact but for rounding with its thresholds left at 1: a guess, the draft's "
            "likeliest token, is kept with probability p; q is not used, and drafts of one's own "
            "(STANDALONE) cannot use it (--speculative-use-rejection-sampling)",
            "sglang/srt/speculative/eagle_utils.py, sglang/srt/arg_groups/speculative_hook.py",
            "model",
        ),
        Fact(
            "on CUDA exact but for rounding: a copied guess is kept with probability p",
            "sglang/srt/speculative/eagle_utils.py",
            "lookup",
        ),
        Fact(
            "on CPU, XPU and ROCm every text is greedy, whatever the temperature that is asked for",
            "sglang/srt/speculative/eagle_utils.py",
        ),
        Fact(
            "top-k together with top-p is another law than its own without guesses: one after the "
            "other, not jointly",
            "sglang/srt/speculative/eagle_utils.py, sglang/srt/layers/sampler.py",
        ),
        Fact(
            "penalties are those of the first position at every guess: another law",
            "https://github.com/sgl-project/sglang/pull/22049",
        ),
    ),
    lacks=(
        Fact("encoder-decoders such as T5 are not served", "sglang/srt/models"),
        Fact(
            "the dtype is its own choice: --dtype float32 asks for what is the rule here",
            "https://docs.sglang.io/advanced_features/server_arguments.html",
        ),
        Fact("min_p is ignored without a word", "sglang/srt/speculative/eagle_utils.py"),
        Fact(
            "gamma is one number for all steps: its adaptive ladder is for EAGLE drafts",
            "sglang/srt/speculative/adaptive_spec_params.py",
        ),
        Fact(
            "no lenience with a stated bias: its thresholds below 1 state none",
            "sglang/srt/speculative/eagle_utils.py",
        ),
        Fact(
            "a seed's text is repeated only with deterministic inference",
            "sglang/srt/speculative/eagle_utils.py",
        ),
        Fact(
            "drafts with another vocabulary, in size or in words, are refused",
            "sglang/srt/speculative/standalone_worker_v2.py",
            "model",
        ),
        Fact(
            "it looks up trees in all texts that it has written, not in this one alone, on CUDA, "
            "CPU and XPU",
            "sglang/srt/speculative/ngram_worker.py, sglang/srt/arg_groups/speculative_hook.py",
            "lookup",
        ),
    ),
)
