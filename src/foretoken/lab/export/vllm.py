"""vLLM, as its released wheel reads."""

from __future__ import annotations

import json
import shlex
from typing import Any

from foretoken.lab.export.base import ExportSetting, Fact, System

NGRAM = 8  # tokens of a match at most that vLLM is told: it wants a number, ours matches any


def config(setting: ExportSetting) -> dict[str, Any]:
    """Its --speculative-config for a draft model or look-up."""
    if setting.kind == "lookup":
        return {
            "method": "ngram",
            "num_speculative_tokens": setting.gamma,
            "prompt_lookup_max": NGRAM,
            "prompt_lookup_min": 1,
        }
    settings: dict[str, Any] = {
        "method": "draft_model",
        "model": setting.draft,
        "num_speculative_tokens": setting.gamma,
    }
    if setting.draft_revision is not None:
        settings["revision"] = setting.draft_revision
    if setting.temperature:
        settings["draft_sample_method"] = "probabilistic"
    return settings


def steps(setting: ExportSetting) -> list[str]:
    command = ["vllm", "serve", setting.target]
    if setting.revision is not None:
        command += ["--revision", setting.revision]
    if setting.kind != "plain":
        command += ["--speculative-config", json.dumps(config(setting))]
    return [shlex.join(command)]


VLLM = System(
    name="vLLM",
    version="0.33.0",
    flags="https://docs.vllm.ai/en/latest/features/speculative_decoding/",
    steps=steps,
    law=(
        Fact(
            "exact but for rounding: a guess is kept with probability min(1, p/q), and a rejected "
            "one is replaced from max(p - q, 0)",
            "vllm/v1/sample/rejection_sampler.py, "
            "vllm/v1/worker/gpu/spec_decode/rejection_sampler_utils.py",
            "model",
        ),
        Fact(
            "by itself it drafts the likeliest token, as if certain (q = 1), which is exact and "
            "keeps fewer guesses; draft_sample_method probabilistic draws them from q",
            "vllm/config/speculative.py",
            "model",
        ),
        Fact(
            "exact but for rounding: a copied guess is kept with probability p",
            "vllm/v1/sample/rejection_sampler.py, "
            "vllm/v1/worker/gpu/spec_decode/rejection_sampler_utils.py",
            "lookup",
        ),
    ),
    lacks=(
        Fact(
            "encoder-decoders such as T5 and BART are no longer served",
            "https://github.com/vllm-project/vllm/pull/24907",
        ),
        Fact(
            "gamma is one number for all steps, or a schedule by batch size; it is not chosen from "
            "what the rows have kept",
            "vllm/config/speculative.py",
        ),
        Fact(
            "the dtype is its own choice: --dtype float32 asks for what is the rule here",
            "https://docs.vllm.ai/en/latest/configuration/engine_args/",
        ),
        Fact("min_p is refused with status 400", "vllm/sampling_params.py"),
        Fact(
            "logits processors of one's own are refused at the start by its older runner (V1), not "
            "by the one it takes by itself where it can (V2)",
            "vllm/v1/sample/logits_processor/__init__.py, "
            "vllm/v1/worker/gpu/sample/logits_processor/loader.py",
        ),
        Fact(
            "no lenience with a stated bias: its lossy rule (fly) states none",
            "vllm/config/speculative.py",
        ),
        Fact(
            "a seed's text is not the one without guesses",
            "https://github.com/vllm-project/vllm/issues/13196",
        ),
        Fact(
            "its tests of greedy texts pass where two thirds are equal to those without guesses",
            "tests/v1/e2e of its repository",
        ),
        Fact(
            "drafts with a vocabulary of another size are refused",
            "vllm/config/speculative.py",
            "model",
        ),
        Fact(
            f"a match is of at most {NGRAM} tokens (prompt_lookup_max), here of any length",
            "vllm/config/speculative.py",
            "lookup",
        ),
    ),
)
