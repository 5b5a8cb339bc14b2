"""Calls of transformers' `generate` that no Speculator decodes: each with the beginning of the line
that refuses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    GenerationConfig,
    MaxTimeCriteria,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    SynthIDTextWatermarkLogitsProcessor,
    WatermarkingConfig,
)

from pairs import DEVICE, PROMPTS, relative

TWO = torch.tensor([[5, 2], [3, 4]], device=DEVICE)
TOLD = {"return_dict_in_generate": True}


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.puts: list[Any] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.puts.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


class Nine(StoppingCriteria):
    """Ends rows of nine tokens."""

    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(ids),), ids.shape[1] >= 9)


class Unsure(StoppingCriteria):
    """Ends rows where the last token was likely."""

    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return scores[-1].softmax(-1).amax(-1) > 0.9


@dataclass(frozen=True)
class Refusal:
    """`options`: of the call, made of the model; a fresh streamer or cache for each."""

    says: str
    options: Callable[[Any], dict[str, Any]]
    family: str = "Llama"


def _entry(says: str, **options: Any) -> Refusal:
    return Refusal(says, lambda model: dict(options))


def _forced(model: Any) -> dict[str, Any]:
    """By an entry that `generate` takes in a config alone."""
    config = GenerationConfig()
    config.forced_decoder_ids = [[1, 7]]  # pyright: ignore[reportAttributeAccessIssue]
    return {"generation_config": config}


NAMED: dict[str, Any] = {
    "penalty_alpha": 0.6,
    "top_h": 0.5,
    "guidance_scale": 1.5,
    "watermarking_config": WatermarkingConfig(seeding_scheme="lefthash"),
    "dola_layers": "low",
    "constraints": [object()],
    "output_attentions": True,
    "output_hidden_states": True,
    "use_mtp": True,
    "assistant_early_exit": 1,
    "assistant_ensemble_weight": 0.5,
    "speculation_type": "dflash",
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.7,
    "assistant_lookbehind": 7,
    "target_lookbehind": 7,
    "max_matching_ngram_size": 3,
}
# What `generate` itself wants beside some of them
BESIDE: dict[str, dict[str, Any]] = {
    "penalty_alpha": {"top_k": 4},
    "top_h": {"do_sample": True},
    "constraints": {"num_beams": 1},
    "output_attentions": TOLD,
    "output_hidden_states": TOLD,
}
# By the generation config's entries: all that are refused (`test_unsupported` counts them)
ENTRIES: dict[str, Refusal] = {
    **{n: _entry(f"{n}=", **{n: value}, **BESIDE.get(n, {})) for n, value in NAMED.items()},
    "num_beams": _entry("num_beams=3 asks for a beam search", num_beams=3),
    "num_beam_groups": _entry(
        "num_beams=4 asks", num_beams=4, num_beam_groups=2, diversity_penalty=0.5
    ),
    "force_words_ids": _entry("num_beams=2 asks", force_words_ids=[[3]], num_beams=2),
    "forced_decoder_ids": Refusal("forced_decoder_ids=[", _forced),
}


def _embeds(model: Any) -> dict[str, Any]:
    return {
        "inputs_embeds": model.get_input_embeddings()(torch.tensor([PROMPTS[0]], device=DEVICE))
    }


def _synth_id() -> list[Any]:
    device = torch.device("cpu")
    return [SynthIDTextWatermarkLogitsProcessor(2, [3, 5], 64, 0, 4, device=device)]


OTHERS: dict[str, Refusal] = {
    "a generation config": Refusal(
        "num_beams=2 asks", lambda _: {"generation_config": GenerationConfig(num_beams=2)}
    ),
    "several forced ids": _entry("forced_eos_token_id=[5, 6] is not", forced_eos_token_id=[5, 6]),
    "an assistant": Refusal("assistant_model is given", lambda m: {"assistant_model": relative(m)}),
    "look-up": _entry("prompt_lookup_num_tokens is given, but", prompt_lookup_num_tokens=3),
    "synced_gpus": _entry("synced_gpus is given", synced_gpus=True),
    "a cache": Refusal(
        "a cache is given", lambda m: {"past_key_values": DynamicCache(config=m.config)}
    ),
    "embeddings": Refusal("inputs_embeds is given", _embeds),
    "an encoder's embeddings": Refusal("inputs_embeds is given", _embeds, "T5"),
    "an encoder's states": Refusal(
        "encoder_outputs is given",
        lambda m: {"encoder_outputs": m.get_encoder()(torch.tensor([PROMPTS[0]], device=DEVICE))},
        "T5",
    ),
    "a hole for an encoder": Refusal(
        "attention_mask leaves out tokens of the encoder",
        lambda _: {"attention_mask": torch.tensor([[1, 0, 1]], device=DEVICE)},
        "T5",
    ),
    "positions": Refusal(
        "position_ids do not count",
        lambda _: {"position_ids": torch.tensor([[4, 5, 6]], device=DEVICE)},
    ),
    "a hole": Refusal(
        "attention_mask leaves out tokens behind",
        lambda _: {"attention_mask": torch.tensor([[1, 0, 1]], device=DEVICE)},
    ),
    "past the context": _entry(
        "a row may grow to 1000003 tokens, the model holds",
        max_new_tokens=10**6,
        stopping_criteria=[Nine()],
    ),
    "a penalty twice": Refusal(
        "RepetitionPenaltyLogitsProcessor is given, and repetition_penalty is set too",
        lambda _: {
            "repetition_penalty": 1.2,
            "logits_processor": [RepetitionPenaltyLogitsProcessor(1.5)],
        },
    ),
    "an order": _entry(
        "PrefixConstrainedLogitsProcessor would come before forced_eos_token_id",
        prefix_allowed_tokens_fn=lambda b, ids: [1, 2],
        forced_eos_token_id=3,
    ),
    "an end twice": Refusal(
        "EosTokenCriteria is given, and eos_token_id is set too",
        lambda _: {"eos_token_id": 3, "stopping_criteria": [EosTokenCriteria(5)]},
    ),
    "an end of one row": Refusal(
        "MaxTimeCriteria may end one row before",
        lambda _: {"inputs": TWO, "stopping_criteria": [MaxTimeCriteria(600.0)]},
    ),
    "scores for a criterion": _entry(
        "Unsure reads the scores", stopping_criteria=[Unsure()], output_scores=True, **TOLD
    ),
    "places of a batch": Refusal(
        "MinNewTokensLengthLogitsProcessor counts a batch's places",
        lambda _: {
            "inputs": TWO,
            "logits_processor": [MinNewTokensLengthLogitsProcessor(2, 3, 0)],
        },
    ),
    "a state": Refusal(
        "SynthIDTextWatermarkLogitsProcessor keeps a state",
        lambda _: {"logits_processor": _synth_id()},
    ),
    "a streamer of two rows": Refusal(
        "a streamer takes one row, not 2", lambda _: {"inputs": TWO, "streamer": Recorder()}
    ),
}
REFUSALS = ENTRIES | OTHERS
