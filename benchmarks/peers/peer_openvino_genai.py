"""OpenVINO GenAI, plain and with a draft model, for `race.py --vs openvino-genai`.

Greedy only: with a draft its sampling fails a check of its own. It reads the stateful export that
export_openvino.py makes in the project's Python. By default it chooses for the processor what it
computes in and what it rounds the cache to; "same-precision" holds both to ours.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from answer import Clock, Refused, Request, Texts, serve
from converted import converted, run_converter
from openvino import opset13 as ops
from openvino_tokenizers import build_rwkv_tokenizer

DTYPES = ("float32", "bfloat16", "int8", "int4")
ROUNDED = ("int8", "int4")  # activations are rounded in groups too
EXPORT = Path(__file__).with_name("export_openvino.py")
PACKAGES = Path(ov.__file__).parents[1]


class Streamer(genai.StreamerBase):
    """Told of new tokens, one or several, when they come."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def write(self, token: int | list[int]) -> genai.StreamingStatus:
        self.clock.tick(1 if isinstance(token, int) else len(token))
        return genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


class Peer:
    """A pipeline for plain decoding, and one with a draft where there is one; for several texts at
    once they are those of continuous batching."""

    def __init__(self, request: Request) -> None:
        target, hints = export(request, request["target"], request["dtype"])
        self.batched = request["batched"]
        pipeline = _batching if self.batched else genai.LLMPipeline
        self.plain, self.assisted = pipeline(target, "CPU", **hints), None
        if request["draft"]:
            draft, own = export(request, request["draft"], request["draft_dtype"])
            draft = genai.draft_model(draft, "CPU", **own)
            self.assisted = pipeline(target, "CPU", draft_model=draft, **hints)

    def generate(self, request: Request) -> Texts:
        if request["temperature"]:
            raise Refused("openvino-genai is run greedily only; leave --temperature at 0")
        config = genai.GenerationConfig(
            max_new_tokens=request["max_new_tokens"], ignore_eos=True, do_sample=False
        )
        config.set_eos_token_id(0)  # it takes none for -1, and refuses that; nothing stops there
        if request["gamma"]:
            config.num_assistant_tokens = request["gamma"]
        pipeline = self.assisted if request["gamma"] else self.plain
        prompts = [ov.Tensor(np.array([ids], dtype=np.int64)) for ids in request["prompts"]]
        clock = Clock()
        if self.batched:  # its streamers hear one text only
            results = pipeline.generate(prompts, [config] * len(prompts))
            texts = [one.m_generation_ids[0] for one in results]
        else:
            texts = pipeline.generate(*prompts, config, Streamer(clock)).tokens
        return [clock.text([int(token) for token in text]) for text in texts]


def _batching(folder: Path, device: str, **hints: Any) -> genai.ContinuousBatchingPipeline:
    return genai.ContinuousBatchingPipeline(folder, genai.SchedulerConfig(), device, hints)


def export(request: Request, source: str, dtype: str) -> tuple[Path, dict[str, Any]]:
    """A folder that GenAI reads, and what it is compiled with."""
    if dtype not in DTYPES:
        raise Refused(f"openvino-genai is run in {', '.join(DTYPES)}, not {dtype}")

    def convert(model: Path, place: Path) -> None:
        run_converter(request, EXPORT, [PACKAGES], str(model), str(place), dtype)
        _spell(place, json.loads((model / "config.json").read_text())["vocab_size"])

    hints: dict[str, Any] = {"INFERENCE_NUM_THREADS": request["threads"]}
    if request["setting"] == "same-precision":
        hint = {"float32": "f32", "bfloat16": "bf16"}[_computed(dtype)]
        hints |= {
            "INFERENCE_PRECISION_HINT": hint,
            "KV_CACHE_PRECISION": hint,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": "32" if dtype in ROUNDED else "0",
        }
    return converted(source, f"openvino-{dtype}", convert), hints


def _computed(dtype: str) -> str:
    """What is computed in, as in the package: bfloat16 where the CPU has its arithmetic."""
    able = "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return "bfloat16" if dtype == "bfloat16" and able else "float32"


def _spell(place: Path, V: int) -> None:
    """A tokenizer of letters and made-up words: GenAI tries one out, though ids go in and out."""
    spellings = [chr(i) if i < 128 else f"<{i}>" for i in range(V)]
    lines = [f"{i} {word!r} {len(word)}" for i, word in enumerate(spellings)]
    tokenizer, detokenizer = build_rwkv_tokenizer(lines)
    ids = tokenizer.get_results()[0].input_value(0)
    mask = ops.broadcast(ops.constant(np.int64(1)), ops.shape_of(ids))
    mask.output(0).get_tensor().set_names({"attention_mask"})
    tokenizer.add_results([ops.result(mask)])
    ov.save_model(tokenizer, place / "openvino_tokenizer.xml")
    ov.save_model(detokenizer, place / "openvino_detokenizer.xml")


def load(request: Request) -> tuple[dict[str, Any], Any]:
    peer = Peer(request)
    dtype = request["dtype"]
    computed = cache = _computed(dtype)
    if request["setting"] != "same-precision":
        core = ov.Core()
        computed = core.get_property("CPU", "INFERENCE_PRECISION_HINT").to_string()
        cache = core.get_property("CPU", "KV_CACHE_PRECISION").to_string()
    rounded = "int8" if dtype in ROUNDED else computed
    kinds = {"weights": dtype, "cache": cache, "activations": rounded}
    return {"version": genai.__version__, "precision": kinds}, peer.generate


if __name__ == "__main__":
    serve(load)
