"""transformers' own `generate` and assisted generation, for `foretoken bench --vs transformers`.

The project's own venv. gamma is constant, and no guess is held back for want of confidence.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from answer import Clock, Refused, Request, serve
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    PreTrainedModel,
)


class Streamer:
    """Told of new tokens by `generate`; its first call is the prompt, or the decoder's start."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.calls = clock, 0

    def put(self, value: torch.Tensor) -> None:
        if self.calls:
            self.clock.tick(value.numel())
        self.calls += 1

    def end(self) -> None:
        pass


class Peer:
    """A target and, where there is one, its assistant."""

    def __init__(self, asked: Request) -> None:
        self.target = _model(asked["target"], asked["dtype"])
        self.draft = asked["draft"] and _model(asked["draft"], asked["draft_dtype"])

    def generate(self, asked: Request) -> dict[str, Any]:
        prompt = torch.tensor([asked["prompt"]])
        helped: dict[str, Any] = {}
        if asked["gamma"]:
            settings = self.draft.generation_config
            settings.num_assistant_tokens = asked["gamma"]
            settings.num_assistant_tokens_schedule = "constant"
            settings.assistant_confidence_threshold = 0.0
            helped["assistant_model"] = self.draft
        torch.manual_seed(asked["seed"])
        clock = Clock()
        out = self.target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            generation_config=_settings(asked, self.target.generation_config),
            streamer=Streamer(clock),
            **helped,
        )
        start = 1 if self.target.config.is_encoder_decoder else prompt.shape[1]
        return clock.answer(out[0, start:].tolist())


def _settings(asked: Request, own: GenerationConfig) -> GenerationConfig:
    """Greedy, or the law at a temperature; nothing ends a text but its length."""
    how: dict[str, Any] = {"do_sample": False}
    if asked["temperature"]:
        how = {
            "do_sample": True,
            "temperature": asked["temperature"],
            "top_k": asked["top_k"],
            "top_p": asked["top_p"],
        }
    return GenerationConfig(
        max_new_tokens=asked["max_new_tokens"],
        pad_token_id=own.pad_token_id if own.pad_token_id is not None else 0,
        decoder_start_token_id=own.decoder_start_token_id,
        use_cache=True,
        **how,
    )


def _model(folder: str, dtype: str) -> PreTrainedModel:
    if dtype not in ("float32", "bfloat16", "float16", "float64"):
        raise Refused(f"transformers has no weights of {dtype}; leave it out or give another dtype")
    encoder = AutoConfig.from_pretrained(folder, trust_remote_code=False).is_encoder_decoder
    auto = AutoModelForSeq2SeqLM if encoder else AutoModelForCausalLM
    kind = getattr(torch, dtype)
    model = auto.from_pretrained(folder, dtype=kind, trust_remote_code=False).eval()
    own = model.generation_config  # of which `generate` would follow what is not asked for
    model.generation_config = GenerationConfig(
        bos_token_id=own.bos_token_id,
        pad_token_id=own.pad_token_id,
        decoder_start_token_id=own.decoder_start_token_id,
    )
    return model


def load(asked: Request) -> tuple[dict[str, Any], Any]:
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(asked["threads"])
    peer = Peer(asked)
    kinds = {"weights": asked["dtype"], "cache": asked["dtype"], "activations": asked["dtype"]}
    return {"version": transformers.__version__, "precision": kinds}, peer.generate


if __name__ == "__main__":
    serve(load)
