"""What comes back from `model.generate(..., custom_generate=spec)` beside ids: scores, logits and
streams, against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import TextIteratorStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from foretoken import Speculator, load
from pairs import PROMPTS, an_end, relative, target
from refusals import Recorder
from tiny import byte_level, llama

LIMIT = 12
PLAIN = {"max_new_tokens": LIMIT, "pad_token_id": 1, "do_sample": False}
TOLD = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


@pytest.fixture(scope="module", params=["Llama", "T5"])
def pair(request: pytest.FixtureRequest) -> tuple[Any, Speculator]:
    model: Any = target(request.param)
    return model, load(model, relative(model), runtime="transformers")


def both(pair: tuple[Any, Speculator], ids: Any, **options: Any) -> tuple[Any, Any]:
    model, spec = pair
    options = PLAIN | TOLD | options
    expected = model.generate(torch.tensor(ids), **options)
    own = {"custom_generate": spec, "num_assistant_tokens": 3}
    return model.generate(torch.tensor(ids), **own, **options), expected


def near(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    """As near as float32 allows, in which transformers computes scores."""
    assert isinstance(found, tuple) and len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype == torch.float32 and a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.5, "suppress_tokens": [3, 9]},
        {"no_repeat_ngram_size": 2, "renormalize_logits": True},
    ],
)
def test_scores_and_logits(pair, options):
    model, _ = pair
    outputs, expected = both(pair, [PROMPTS[1]], **options)
    kinds = {True: GenerateEncoderDecoderOutput, False: GenerateDecoderOnlyOutput}
    assert type(outputs) is type(expected) is kinds[model.config.is_encoder_decoder]
    assert outputs.sequences.tolist() == expected.sequences.tolist()
    near(outputs.scores, expected.scores)
    near(outputs.logits, expected.logits)
    assert outputs.past_key_values is None


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 4, "temperature": 0.7},
        {"top_k": 0, "top_p": 0.8, "renormalize_logits": True},
        {"top_k": 0, "typical_p": 0.7, "repetition_penalty": 1.3},
    ],
)
def test_sampled_scores_are_those_that_transformers_would_have_there(pair, options):
    """Of the first place; what follows was drawn by other numbers."""
    outputs, expected = both(pair, [PROMPTS[0]], do_sample=True, **options)
    near(outputs.scores[:1], expected.scores[:1])
    near(outputs.logits[:1], expected.logits[:1])
    first = 1 if pair[0].config.is_encoder_decoder else len(PROMPTS[0])
    for scores, token in zip(outputs.scores, outputs.sequences[0, first:], strict=True):
        assert scores[0, token] > -torch.inf


def test_rows_that_have_ended_have_zeros(pair):
    model, _ = pair
    eos = an_end(model, PROMPTS[1], LIMIT)
    outputs, expected = both(pair, [PROMPTS[1], PROMPTS[1][::-1]], eos_token_id=eos)
    assert outputs.sequences.tolist() == expected.sequences.tolist()
    begin = outputs.sequences.shape[1] - len(outputs.scores)
    ended = [False, False]
    for at, (scores, logits) in enumerate(zip(outputs.scores, outputs.logits, strict=True)):
        for b in range(2):
            if ended[b]:
                assert not scores[b].any() and not logits[b].any()
            else:
                near((scores[b],), (expected.scores[at][b],))
                near((logits[b],), (expected.logits[at][b],))
            ended[b] |= outputs.sequences[b, begin + at].item() == eos
    assert any(ended)


def test_nothing_is_kept_that_was_not_asked_for(pair):
    outputs, _ = both(pair, [PROMPTS[0]], output_scores=False, output_logits=False)
    assert outputs.scores is None and outputs.logits is None and outputs.sequences.ndim == 2
    outputs, _ = both(pair, [PROMPTS[0]], return_dict_in_generate=False)
    assert isinstance(outputs, torch.Tensor) and not outputs.is_inference()


def test_a_streamer_is_called_as_transformers_calls_it(pair):
    model, spec = pair
    theirs, ours = Recorder(), Recorder()
    ids = torch.tensor([PROMPTS[1]])
    model.generate(ids, streamer=theirs, **PLAIN)
    own = {"custom_generate": spec, "num_assistant_tokens": 3}
    model.generate(ids, streamer=ours, **own, **PLAIN)
    assert ours.puts == theirs.puts and len(ours.puts) == 1 + LIMIT
    assert ours.ended == theirs.ended == 1


def test_a_streamer_of_text_comes_to_its_end():
    model: Any = llama(320).double()
    spec = load(model, "lookup", runtime="transformers")
    ids = byte_level()("It was the", return_tensors="pt").input_ids
    streamer = TextIteratorStreamer(byte_level(), skip_prompt=True, timeout=1.0)
    options = {"streamer": streamer, "custom_generate": spec, "prompt_lookup_num_tokens": 2}
    completions = model.generate(ids, **options, **PLAIN)
    assert "".join(streamer) == byte_level().decode(completions[0, ids.shape[1] :])
