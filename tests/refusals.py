"""Calls of transformers' `generate` that no Speculator decodes: each with the beginning of the line
that refuses it."""

from __future__ import annotations

import copy
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


def _entry(says: str, family: str = "Llama", **options: Any) -> Refusal:
    return Refusal(says, lambda model: copy.deepcopy(options), family)


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
    return {"inputs_embeds": model.get_input_embeddings()(IDS)}


IDS, HOLE = (torch.tensor([ids], device=DEVICE) for ids in (PROMPTS[0], [1, 0, 1]))
SYNTH_ID = SynthIDTextWatermarkLogitsProcessor(2, [3, 5], 64, 0, 4, device=torch.device("cpu"))
OTHERS: dict[str, Refusal] = {
    "a generation config": _entry(
        "num_beams=2 asks", generation_config=GenerationConfig(num_beams=2)
    ),
    "several forced ids": _entry("forced_eos_token_id=[5, 6] is not", forced_eos_token_id=[5, 6]),
    "an assistant": Refusal("assistant_model is given", lambda m: {"assistant_model": relative(m)}),
    "look-up": _entry("prompt_lookup_num_tokens is given, but", prompt_lookup_num_tokens=3),
    "synced_gpus": _entry("synced_gpus is given", synced_gpus=True),
    "a cache": Refusal(
        "past_key_values is given", lambda m: {"past_key_values": DynamicCache(config=m.config)}
    ),
    "embeddings": Refusal("inputs_embeds is given", _embeds),
    "an encoder's embeddings": Refusal("inputs_embeds is given", _embeds, "T5"),
    "an encoder's states": Refusal(
        "encoder_outputs is given", lambda m: {"encoder_outputs": m.get_encoder()(IDS)}, "T5"
    ),
    "a hole for an encoder": _entry(
        "attention_mask leaves out encoder tokens", "T5", attention_mask=HOLE
    ),
    "positions": _entry("position_ids do not count", position_ids=HOLE + 4),
    "a hole": _entry("attention_mask leaves out tokens after", attention_mask=HOLE),
    "past the context": _entry(
        "a sequence may grow to 1000003 tokens, but the model's context length is",
        max_new_tokens=10**6,
        stopping_criteria=[Nine()],
    ),
    "a penalty twice": _entry(
        "RepetitionPenaltyLogitsProcessor is given and repetition_penalty is set",
        repetition_penalty=1.2,
        logits_processor=[RepetitionPenaltyLogitsProcessor(1.5)],
    ),
    "an order": _entry(
        "PrefixConstrainedLogitsProcessor would come before forced_eos_token_id",
        prefix_allowed_tokens_fn=lambda b, ids: [1, 2],
        forced_eos_token_id=3,
    ),
    "an end twice": _entry(
        "EosTokenCriteria is given and eos_token_id is set to other ids",
        eos_token_id=3,
        stopping_criteria=[EosTokenCriteria(5)],
    ),
    "an end of one row": _entry(
        "MaxTimeCriteria may end one sequence before",
        inputs=TWO,
        stopping_criteria=[MaxTimeCriteria(1e9)],
    ),
    "scores for a criterion": _entry(
        "Unsure uses the scores", stopping_criteria=[Unsure()], output_scores=True, **TOLD
    ),
    "places of a batch": _entry(
        "MinNewTokensLengthLogitsProcessor depends on positions in the padded batch",
        inputs=TWO,
        logits_processor=[MinNewTokensLengthLogitsProcessor(2, 3, 0)],
    ),
    "a state": _entry(
        "SynthIDTextWatermarkLogitsProcessor is not supported, because it stores state",
        logits_processor=[SYNTH_ID],
    ),
    "a streamer of two rows": _entry(
        "a streamer takes one sequence, not 2", inputs=TWO, streamer=Recorder()
    ),
}
REFUSALS = ENTRIES | OTHERS
