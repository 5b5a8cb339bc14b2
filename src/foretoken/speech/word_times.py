"""Times of words from Whisper's cross-attention. Another forward pass over a window's transcribed
tokens computes the attention, and transformers' own code converts it to times."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers.models.whisper import tokenization_whisper
from transformers.utils.generic import ModelOutput

from foretoken.errors import RefusedError
from foretoken.models.stock.attention import make_twin_with_attention

ALIGNMENT_HEADS = "alignment_heads"  # generation config: heads whose attention follows the audio
FRAMES_PER_SECOND = 100  # of audio features


class WordTimer:
    """A decoding method for Whisper's `generate`: it generates the tokens of each window with a
    Speculator and adds the tokens' times to the output.

    Args:
        spec: The Speculator that generates the tokens.
        network: The Speculator's target.
        frames: Number of feature frames of the whole audio, without padding.
        streamer: The transformers streamer, which `generate` does not pass to a decoding method.

    Raises:
        RefusedError: The network's generation config has no alignment heads.
    """

    def __init__(self, spec: Any, network: Any, frames: int, streamer: Any) -> None:
        if getattr(network.generation_config, ALIGNMENT_HEADS, None) is None:
            raise RefusedError(
                f"the generation config of this {type(network).__name__} has no "
                f"{ALIGNMENT_HEADS}, which times of words need; leave words out"
            )
        self.spec, self.frames, self.streamer = spec, frames, streamer
        self.seek = 0  # first frame of the current window
        self.__signature__ = inspect.signature(spec)  # transformers inspects it
        # only eager attention returns its weights
        self._network: Any = make_twin_with_attention(network, "eager")

    def __call__(self, model: Any, input_ids: Tensor, **given: Any) -> dict[str, Any]:
        output_or_ids = self.spec(model, input_ids, streamer=self.streamer, **given)
        output = (
            {"sequences": output_or_ids}
            if isinstance(output_or_ids, Tensor)
            else dict(output_or_ids)
        )
        times = self._compute_token_times(
            output["sequences"], input_ids.shape[1], given["encoder_outputs"]
        )
        return output | {"token_timestamps": times.double() + self.seek / FRAMES_PER_SECOND}

    @torch.inference_mode()
    def _compute_token_times(
        self, ids: Tensor, num_prompt_tokens: int, encoder_outputs: Any
    ) -> Tensor:
        """Return `[1, n]`: the end of each token in seconds from the window's beginning."""
        left = max(2, self.frames - self.seek)  # a window may extend into the padding of the audio
        attentions = self._network(
            encoder_outputs=encoder_outputs,
            decoder_input_ids=ids[:, :-1],
            output_attentions=True,
            use_cache=False,
            return_dict=True,
        ).cross_attentions
        return self._network._extract_token_timestamps(
            ModelOutput(sequences=ids, cross_attentions=(attentions,)),
            getattr(self._network.generation_config, ALIGNMENT_HEADS),
            num_frames=torch.tensor([left]),
            num_input_ids=num_prompt_tokens,
        )

    def get_words(
        self, tokenizer: Any, piece: dict[str, Any], language: str | None
    ) -> list[tuple[str, float, float]]:
        """Return the words of a segment of `generate`'s output, each with its start and end in
        seconds. `language` is the code of the spoken language, because some languages have no
        spaces between words."""
        first = piece["idxs"][0]
        ends = piece["result"]["token_timestamps"].tolist()
        special, last = (
            {*tokenizer.all_special_ids},
            self._network.generation_config.no_timestamps_token_id,
        )
        spoken = [
            (token, ends[i - 1], ends[i])
            for i, token in enumerate(piece["tokens"].tolist(), first)
            if token not in special and token <= last
        ]
        library: Any = tokenization_whisper
        name, ids = library.LANGUAGES.get(language, "english"), [token for token, *_ in spoken]
        words, _, indices = library._combine_tokens_into_words(tokenizer, ids, name)
        return [
            (word.strip(), round(spoken[at[0]][1], 2), round(spoken[at[-1]][2], 2))
            for word, at in zip(words, indices, strict=True)
            if word.strip()
        ]
