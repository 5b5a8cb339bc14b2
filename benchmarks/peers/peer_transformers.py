"""transformers' own `generate` and assisted generation, for `race.py --vs transformers`.

The project's own venv. gamma is constant, and no draft token is held back for want of confidence.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from answer import Clock, Refused, Request, Texts, serve
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
        self.clock, self.rows = clock, 0

    def put(self, value: torch.Tensor) -> None:
        if self.rows:
            self.clock.tick(value.numel() // self.rows)
        self.rows = self.rows or len(value)

    def end(self) -> None:
        pass


class Peer:
    """A target and, where there is one, its assistant."""

    def __init__(self, request: Request) -> None:
        self.target = _model(request["target"], request["dtype"])
        self.draft = request["draft"] and _model(request["draft"], request["draft_dtype"])

    def generate(self, request: Request) -> Texts:
        """A batch at once; assisted generation takes no batch, so its texts come one after
        another."""
        clock, prompts, seeds = Clock(), request["prompts"], request["seeds"]
        if not request["gamma"]:
            return self._generate(request, prompts, seeds[0], clock)
        settings = self.draft.generation_config
        settings.num_assistant_tokens = request["gamma"]
        settings.num_assistant_tokens_schedule = "constant"
        settings.assistant_confidence_threshold = 0.0
        return [
            text
            for prompt, seed in zip(prompts, seeds, strict=True)
            for text in self._generate(request, [prompt], seed, clock, assistant_model=self.draft)
        ]

    def _generate(
        self, request: Request, prompts: list[list[int]], seed: int, clock: Clock, **helped: Any
    ) -> Texts:
        settings = _settings(request, self.target.generation_config)
        width = max(map(len, prompts))  # padded on the left, as `generate` wants it
        missing = [width - len(prompt) for prompt in prompts]
        padded = zip(prompts, missing, strict=True)
        torch.manual_seed(seed)
        ids = self.target.generate(
            torch.tensor([[settings.pad_token_id] * n + prompt for prompt, n in padded]),
            attention_mask=torch.tensor([[0] * n + [1] * (width - n) for n in missing]),
            generation_config=settings,
            streamer=Streamer(clock),
            **helped,
        )
        start = 1 if self.target.config.is_encoder_decoder else width
        return [clock.text(tokens) for tokens in ids[:, start:].tolist()]


def _settings(request: Request, own: GenerationConfig) -> GenerationConfig:
    """Greedy, or the distribution at a temperature; nothing ends a text but its length."""
    options: dict[str, Any] = {"do_sample": False}
    if request["temperature"]:
        options = {
            "do_sample": True,
            "temperature": request["temperature"],
            "top_k": request["top_k"],
            "top_p": request["top_p"],
        }
    return GenerationConfig(
        max_new_tokens=request["max_new_tokens"],
        pad_token_id=own.pad_token_id if own.pad_token_id is not None else 0,
        decoder_start_token_id=own.decoder_start_token_id,
        use_cache=True,
        **options,
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


def load(request: Request) -> tuple[dict[str, Any], Any]:
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(request["threads"])
    peer = Peer(request)
    kinds = {
        "weights": request["dtype"],
        "cache": request["dtype"],
        "activations": request["dtype"],
    }
    about = {"version": transformers.__version__, "precision": kinds}
    if peer.draft and peer.target._is_stateful:
        about["plain_only"] = "its assisted generation takes no model with states"
    return about, peer.generate


if __name__ == "__main__":
    serve(load)
