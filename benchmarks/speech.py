"""Speech to text by a Whisper in the shape of `small` (0.24B, random weights) with a draft of its
first decoder layers, in turns with transformers' own plain and assisted generation: medians of the
seconds for one window of 30 s, greedy, and texts compared.

How often the draft agrees is chosen: what the later layers add to the target is scaled by `--rest`.
Expected: 2 over plain generation and 1.5 over assisted, without the encoder, where nine of ten
draft tokens are accepted.

    python benchmarks/speech.py --rest 0.15
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration
from transformers.generation.utils import GenerationMixin

import foretoken
import machine
from foretoken.timing import time_in_turns

SHAPE = {"d_model": 768, "encoder_layers": 12, "decoder_layers": 12, "vocab_size": 51865}
SHAPE |= {f"{side}_attention_heads": 12 for side in ("encoder", "decoder")}
SHAPE |= {f"{side}_ffn_dim": 3072 for side in ("encoder", "decoder")}
DRAFT_LAYERS, GAMMA = 2, 4


def pair(rest: float) -> tuple[Any, Any]:
    """The target, and a draft that shares its encoder and first layers."""
    torch.manual_seed(0)
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    target: Any = WhisperForConditionalGeneration(WhisperConfig(**SHAPE, **ends)).eval()
    config = target.generation_config
    config.suppress_tokens = config.begin_suppress_tokens = None
    config.eos_token_id = config.forced_decoder_ids = None
    layers = target.model.decoder.layers
    with torch.no_grad():
        for layer in layers:
            layer.self_attn.out_proj.weight.mul_(4)  # else each text is one token, again and again
            layer.encoder_attn.out_proj.weight.mul_(4)
        for layer in layers[DRAFT_LAYERS:]:
            for out in (layer.self_attn.out_proj, layer.encoder_attn.out_proj, layer.fc2):
                out.weight.mul_(rest)
                out.bias.mul_(rest)
    draft = copy.deepcopy(target)
    draft.model.decoder.layers = draft.model.decoder.layers[:DRAFT_LAYERS]
    draft.config.decoder_layers = DRAFT_LAYERS
    return target, draft


def loaded(
    target: Any, draft: Any, folder: Path, runtime: str, draft_dtype: str
) -> foretoken.Speculator:
    """The pair as it is loaded from folders, whose encoders are loaded with the first sound."""
    for name, network in (("target", target), ("draft", draft)):
        network.save_pretrained(folder / name)
    return foretoken.load(
        folder / "target", folder / "draft", runtime=runtime, draft_dtype=draft_dtype
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rest", type=float, default=0.15)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--draft-dtype", default="float32")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(given, Path(folder))


def measure(given: argparse.Namespace, folder: Path) -> None:
    torch.set_num_threads(os.cpu_count() or 1)
    target, draft = pair(given.rest)
    features = torch.randn(1, 80, 3000)
    inputs: dict[str, Any] = {
        "input_features": features,
        "decoder_input_ids": torch.tensor([[3, 7]]),
    }
    spec = loaded(target, draft, folder, given.runtime, given.draft_dtype)
    draft.config.num_hidden_layers = DRAFT_LAYERS  # of caches in assisted generation
    mixin: Any = GenerationMixin

    def theirs(**more: Any) -> list[int]:
        asked = {"max_new_tokens": given.tokens, "do_sample": False}
        return mixin.generate(target, **inputs, **asked, **more)[0, 2:].tolist()

    stats: list[Any] = []

    def ours(gamma: int | None) -> list[int]:
        (out,) = spec.generate(inputs, max_new_tokens=given.tokens, gamma=gamma, ignore_eos=True)
        stats.append(out.stats)
        return out.tokens

    ways: dict[str, Any] = {
        "transformers, plain": theirs,
        "transformers, assisted": lambda: theirs(assistant_model=draft),
        "plain": lambda: ours(0),
        f"gamma {GAMMA}": lambda: ours(GAMMA),
        "automatic gamma": lambda: ours(None),
    }
    texts = {name: way() for name, way in ways.items()}  # also measures costs

    def encoding() -> None:
        with torch.inference_mode():
            target.get_encoder()(features)

    seconds = time_in_turns({**ways, "encoder": encoding}, given.rounds, warm_up=0)
    encoder = seconds.pop("encoder")
    taken = {name: median(each) for name, each in seconds.items()}
    alone, last = median(encoder), stats[-1]
    result = {
        "shape": SHAPE,
        "draft_layers": DRAFT_LAYERS,
        "rest": given.rest,
        "tokens": given.tokens,
        "runtime": spec.target.runtime,
        "draft_dtype": given.draft_dtype,
        "rounds": given.rounds,
        "seconds": taken,
        "encoder_seconds": alone,
        "accepted_per_drafted": last.accepted_per_drafted,
        "tokens_per_call": last.tokens_per_call,
        "texts_alike": {n: text == texts["transformers, plain"] for n, text in texts.items()},
        "kinds_of_tokens": len(set(texts["plain"])),
    }
    print(machine.save("speech", result))
    own = taken["automatic gamma"]
    for name, each in taken.items():
        behind, alike = (each - alone) / (own - alone), texts[name] == texts["plain"]
        print(
            f"{name:24} {each:6.2f} s, over ours {each / own:5.2f}, decoder {behind:5.2f} {alike}"
        )
    print(f"encoder {alone:.2f} s; accepted {last.accepted_per_drafted}")


if __name__ == "__main__":
    main()
