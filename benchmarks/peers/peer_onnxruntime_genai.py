"""ONNX Runtime GenAI for `race.py --vs onnxruntime-genai`, in plain decoding only.

Its own model builder converts a saved model. The builder needs torch and transformers, so the
project's Python runs it, with the peer's packages behind its own.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnxruntime_genai as genai
from answer import Clock, Refused, Request, Texts, serve
from converted import converted, run_converter

PRECISIONS = {"float32": "fp32", "int8": "int8", "int4": "int4"}
BUILDER = Path(genai.__file__).with_name("models") / "builder.py"
QUANTIZED = ("block_size=32", "accuracy_level=4")  # the builder's defaults today


class Peer:
    """A model with the number of threads that was asked for."""

    def __init__(self, request: Request) -> None:
        place = export(request)
        config = genai.Config(str(place))
        config.clear_providers()  # those left out are the CPU
        threads = {"intra_op_num_threads": request["threads"]}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": threads}}}))
        self.model = genai.Model(config)

    def generate(self, request: Request) -> Texts:
        """Continue one prompt, by the likeliest tokens."""
        if request["temperature"]:
            raise Refused("onnxruntime-genai is run greedily only; leave --temperature at 0")
        (prompt,), clock = request["prompts"], Clock()
        params = genai.GeneratorParams(self.model)
        full = len(prompt) + request["max_new_tokens"]
        params.set_search_options(max_length=full, do_sample=False, repetition_penalty=1.0)
        generator = genai.Generator(self.model, params)
        generator.append_tokens(prompt)
        while not generator.is_done():
            generator.generate_next_token()
            clock.tick(1)
        return [clock.text(generator.get_sequence(0).tolist()[len(prompt) :])]


def export(request: Request) -> Path:
    """A folder that ONNX Runtime GenAI reads."""
    source, dtype = request["target"], request["dtype"]
    if dtype not in PRECISIONS:
        raise Refused(f"onnxruntime-genai is run in {', '.join(PRECISIONS)}, not {dtype}")

    def convert(model: Path, place: Path) -> None:
        where = ["-i", str(model), "-o", str(place), "-c", str(place / "cache")]
        how = ["-p", PRECISIONS[dtype], "-e", "cpu"]
        if dtype != "float32":
            how += ["--extra_options", *QUANTIZED]
        run_converter(request, BUILDER, [BUILDER.parent, BUILDER.parents[2]], *where, *how)
        _never_end(place / "genai_config.json")

    return converted(source, f"onnxruntime-{dtype}", convert)


def _never_end(file: Path) -> None:
    """Let no usual token end a text. It must be given one, and takes the padding for none; a
    minimal length would forbid that token, and so change the text. Bench refuses one that ends."""
    config = json.loads(file.read_text())
    model = config["model"]
    model["pad_token_id"] = model["vocab_size"] - 1
    model["eos_token_id"] = [model["pad_token_id"]]
    file.write_text(json.dumps(config, indent=2))


def load(request: Request) -> tuple[dict[str, Any], Any]:
    peer = Peer(request)
    rounded = request["dtype"] if request["dtype"] == "float32" else "int8"
    kinds = {"weights": request["dtype"], "cache": "float32", "activations": rounded}
    about = {"version": version("onnxruntime-genai"), "precision": kinds}
    return about | {"plain_only": "it is raced without drafts"}, peer.generate


if __name__ == "__main__":
    serve(load)
