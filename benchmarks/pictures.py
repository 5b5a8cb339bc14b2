"""What a picture costs a chat, and what its decoder gains natively: seconds to the first token of a
prompt with a picture and of one of text of the same length, and milliseconds of a token after it.

A Qwen3.5 of random weights in the shape of 0.8B, with fewer ids, its vision encoder included, and a
picture of 448 x 448: 784 patches, 196 tokens. transformers runs its own `generate`.

Expected: the encoder takes most of the time to the first token, the same on every runtime; a token
as fast natively as behind text.

    python benchmarks/pictures.py native:int8 native:float32 transformers:float32 generate
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

import foretoken
import machine
from foretoken.timing import time_in_turns

SIDE = 28  # patches; four are a token
MARKS = {"image_token_id": 90, "video_token_id": 91}
MARKS |= {"vision_start_token_id": 92, "vision_end_token_id": 93}
TEXT = {"vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 3584, "head_dim": 256}
TEXT |= {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 24}
TEXT |= {"linear_num_key_heads": 16, "linear_num_value_heads": 16}
VISION = {"depth": 12, "hidden_size": 768, "num_heads": 12, "intermediate_size": 3072}
VISION |= {"out_hidden_size": 1024}


def prompts() -> tuple[dict[str, Any], dict[str, Any]]:
    """A prompt with a picture, and one of text that is as long."""
    tokens = SIDE * SIDE // 4
    ids = torch.tensor([[1, 5, 92, *[90] * tokens, 93, *range(100, 120)]])
    pictured = {
        "input_ids": ids,
        "mm_token_type_ids": (ids == 90).long(),
        "pixel_values": torch.randn(SIDE * SIDE, 3 * 2 * 16 * 16),
        "image_grid_thw": torch.tensor([[1, SIDE, SIDE]]),
    }
    return pictured, {"input_ids": torch.where(ids == 90, torch.arange(ids.shape[1]) + 200, ids)}


def stock(model: Any, inputs: dict[str, Any], n: int) -> None:
    model.generate(**inputs, max_new_tokens=n, min_new_tokens=n, do_sample=False)


CALLS = count()


def ours(spec: foretoken.Speculator, inputs: dict[str, Any], n: int) -> None:
    given: Any = inputs
    if len(inputs) == 1:  # each time another one, as a prompt of text would be cached
        given = [[next(CALLS) + 10, *inputs["input_ids"][0].tolist()[1:]]]
    spec.generate(given, max_new_tokens=n, gamma=0, ignore_eos=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ways", nargs="+", help="RUNTIME:DTYPE, or generate")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    torch.manual_seed(0)
    config = Qwen3_5Config(text_config=TEXT, vision_config=VISION, **MARKS)
    model: Any = Qwen3_5ForConditionalGeneration(config).eval()
    both = dict(zip(("picture", "text"), prompts(), strict=True))
    turns: dict[str, Callable[[], None]] = {}
    with tempfile.TemporaryDirectory() as place:
        model.bfloat16().save_pretrained(place)
        model.float()
        for way in asked.ways:
            runtime, *dtype = way.split(":")
            if dtype:
                spec = foretoken.load(Path(place), "lookup", dtype=dtype[0], runtime=runtime)
            for name, inputs in both.items():
                for n in (1, 1 + asked.tokens):
                    run = (
                        (lambda i=inputs, n=n, s=spec: ours(s, i, n))
                        if dtype
                        else (lambda i=inputs, n=n: stock(model, i, n))
                    )
                    turns[f"{way} {name} {n}"] = run
        patches, grid = both["picture"]["pixel_values"], both["picture"]["image_grid_thw"]

        def encoder() -> None:
            with torch.inference_mode():
                model.get_image_features(patches, grid)

        turns["encoder"] = encoder
        seconds = {k: median(x) for k, x in time_in_turns(turns, asked.rounds).items()}
    rows = {}
    for way in asked.ways:
        for name in both:
            first, whole = (seconds[f"{way} {name} {n}"] for n in (1, 1 + asked.tokens))
            rows[f"{way} {name}"] = {
                "first_token_seconds": round(first, 3),
                "ms_a_token": round(1000 * (whole - first) / asked.tokens, 2),
            }
            print(f"{way:24} {name:8} {rows[f'{way} {name}']}")
    print(f"encoder {seconds['encoder']:.3f} s")
    result = {"text": TEXT, "vision": VISION, "tokens": asked.tokens, "rounds": asked.rounds}
    print(machine.save("pictures", result | {"encoder_seconds": seconds["encoder"], "ways": rows}))


if __name__ == "__main__":
    main()
