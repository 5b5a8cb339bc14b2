"""When each word was said, as Whisper's attention to the sound tells: from a pass over a window's
text once it is known, which transformers' own code turns into times.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers.models.whisper import tokenization_whisper
from transformers.utils.generic import ModelOutput

from foretoken.errors import RefusedError
from foretoken.models.stock.attention import make_twin_with_attention

ALIGNMENT_HEADS = "alignment_heads"  # of a generation config: those that follow the sound
FRAMES_PER_SECOND = 100  # of features, a second


class WordTimer:
    """A Speculator as a decoding method of Whisper's `generate`, whose windows have the times of
    their tokens beside them.

    Args:
        spec: The Speculator, which writes the text.
        network: Its target. RefusedError where its generation config names no heads.
        frames: The number of them in the whole sound, without padding.
        streamer: A streamer of transformers, which `generate` does not hand on.
    """

    def __init__(self, spec: Any, network: Any, frames: int, streamer: Any) -> None:
        if getattr(network.generation_config, ALIGNMENT_HEADS, None) is None:
            raise RefusedError(
                f"the generation config of this {type(network).__name__} has no "
                f"{ALIGNMENT_HEADS}, so it "
                "does not tell when words were said; leave words out"
            )
        self.spec, self.frames, self.streamer = spec, frames, streamer
        self.seek = 0  # the frame that the window at hand begins with
        self.__signature__ = inspect.signature(spec)  # which transformers reads
        self._network: Any = make_twin_with_attention(
            network, "eager"
        )  # the attention that can be looked at

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
        """`[1, n]`, seconds from the window's beginning at which each token ends."""
        left = max(2, self.frames - self.seek)  # windows go on over what a short sound is padded by
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
        """Return the words of a piece that `generate` has made with this, and the seconds at which
        each begins and ends. language: its code; it may have no blanks between words."""
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
        texts, _, places = library._combine_tokens_into_words(tokenizer, ids, name)
        return [
            (text.strip(), round(spoken[at[0]][1], 2), round(spoken[at[-1]][2], 2))
            for text, at in zip(texts, places, strict=True)
            if text.strip()
        ]
