"""The compiled kernels and their C interface (`cpp/network.h`): records by ctypes, and a
network that runs passes. Callers have checked what they give: C++ trusts every number."""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from foretoken.errors import InputError, RefusedError
from foretoken.kernels import build

FILE = Path(__file__).parent / "kernels.so"
SETS = ("avx512", "avxvnni", "avx2", "portable")  # the fastest first
CHOICE = "FORETOKEN_INSTRUCTIONS"  # holds the library to one of SETS


class WeightRecord(Structure):
    """The record Weight of network.h."""

    _fields_ = [
        ("kind", c_int32),
        ("outputs", c_int32),
        ("inputs", c_int32),
        ("form", c_int32),
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("rest", c_void_p),
    ]


class NormRecord(Structure):
    """The record Norm of network.h."""

    _fields_ = [
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("epsilon", c_float),
        ("centred", c_int32),
    ]


class ExpertsRecord(Structure):
    """The record Experts of network.h."""

    _fields_ = [
        *((name, c_int32) for name in ("count", "chosen", "sigmoids", "groups", "chosen_groups")),
        *((name, c_int32) for name in ("normalized", "shared_gate")),
        ("scale", c_float),
        ("added", c_void_p),
        ("router", WeightRecord),
        *((name, POINTER(WeightRecord)) for name in ("gate", "up", "down")),
    ]


class RecurrenceRecord(Structure):
    """The record Recurrence of network.h."""

    _fields_ = [
        *((name, c_int32) for name in ("rule", "taps", "key_heads", "key_width")),
        *((name, c_int32) for name in ("groups", "count", "gate_first")),
        *((name, c_float) for name in ("epsilon", "query_scale", "beta_scale")),
        *((name, c_float) for name in ("least_step", "most_step")),
        *((name, c_void_p) for name in ("filters", "filter_bias", "decay", "step_bias")),
        *((name, c_void_p) for name in ("skip", "norm")),
        ("steps", WeightRecord),
        ("at", c_int64),
    ]


class LatentRecord(Structure):
    """The record Latent of network.h."""

    _fields_ = [
        ("rank", c_int32),
        ("query_rank", c_int32),
        ("queries", WeightRecord),
        ("keys", POINTER(WeightRecord)),
        ("values", POINTER(WeightRecord)),
    ]


class LayerRecord(Structure):
    """The record Layer of network.h."""

    _fields_ = [
        *((name, NormRecord) for name in ("before_attention", "after_attention", "before_mlp")),
        *((name, NormRecord) for name in ("after_mlp", "of_queries", "of_keys", "of_values")),
        *((name, WeightRecord) for name in ("qkv", "out", "gate", "up", "down")),
        *((name, c_int32) for name in ("heads", "kv_heads", "width", "rotary", "query_rotary")),
        *(
            (name, c_int32)
            for name in ("rotated", "interleaved", "window", "activation", "parallel")
        ),
        *((name, c_float) for name in ("scale", "softcap", "residual", "clip", "factor")),
        ("curve", c_float * 3),
        ("sinks", c_void_p),
        ("slopes", c_void_p),
        *((name, c_int64) for name in ("keys", "values", "step")),
        *((name, c_int32) for name in ("norms", "halved", "source", "borrowed")),
        *((name, c_int32) for name in ("added_first", "bias")),
        ("gate_of_heads", c_int32),
        ("attention_gate", WeightRecord),
        ("recurrence", RecurrenceRecord),
        ("experts", ExpertsRecord),
        ("latent", LatentRecord),
        *((name, WeightRecord) for name in ("input_gate", "input_out")),
        ("after_input", NormRecord),
        ("input", c_int32),
        ("beside", c_void_p),
    ]


class LayerInputsRecord(Structure):
    """The record LayerInputs of network.h."""

    _fields_ = [
        ("width", c_int32),
        *((name, c_float) for name in ("table_factor", "product_factor", "sum_factor")),
        *((name, WeightRecord) for name in ("table", "product")),
        ("norm", NormRecord),
    ]


class NetworkRecord(Structure):
    """The record Network of network.h."""

    _fields_ = [
        *((name, c_int32) for name in ("width", "layers", "vocabulary", "threads")),
        *((name, c_int32) for name in ("inner", "attention", "most_tokens")),
        *((name, c_float) for name in ("embedding_factor", "logit_factor", "logit_cap")),
        *((name, WeightRecord) for name in ("embeddings", "positions", "head")),
        *((name, NormRecord) for name in ("embedding_norm", "last")),
        ("layer", POINTER(LayerRecord)),
        ("beside", c_int32),
        ("before_last", c_int32),
        ("beside_norm", NormRecord),
        ("encoder", c_int32),
        ("inputs", LayerInputsRecord),
    ]


class PassRecord(Structure):
    """The record Pass of network.h."""

    _fields_ = [
        *((name, c_int32) for name in ("tokens", "needed", "rows", "tables")),
        *((name, c_void_p) for name in ("ids", "given", "at", "turn", "row", "pages")),
        *((name, c_void_p) for name in ("rotary", "need", "place", "logits", "hidden", "taps")),
        ("tap_stride", c_int64),
        *((name, c_void_p) for name in ("sources", "source_length", "biases")),
        ("bias_reach", c_int64),
        ("bias_stride", c_int64),
        *((name, c_void_p) for name in ("states", "ends", "added")),
    ]


class MatrixRecord(Structure):
    """The record Matrix of network.h."""

    _fields_ = [
        ("numbers", c_void_p),
        ("of_group", c_int64),
        ("of_part", c_int64),
        ("inner", c_int32),
    ]


class SoftmaxRecord(Structure):
    """The record Softmax of network.h."""

    _fields_ = [
        *((name, c_int32) for name in ("rows", "V", "threads", "top_k")),
        *((name, c_float) for name in ("temperature", "min_p")),
        ("top_p", c_double),
        ("logits", MatrixRecord),
        ("p", c_void_p),
        ("failed", c_void_p),
    ]


class ChainRecord(Structure):
    """The record Chain of network.h."""

    _fields_ = [
        *((name, c_int32) for name in ("rows", "steps", "wide", "kind")),
        *((name, c_void_p) for name in ("budget", "next", "apart", "pages_of")),
        *((name, c_void_p) for name in ("sources_of", "states_of", "length_of")),
        ("choice", SoftmaxRecord),
        *((name, c_void_p) for name in ("u", "ids", "embeddings", "tokens", "tops", "masses")),
        *((name, c_void_p) for name in ("q", "narrow", "pages", "sources", "states")),
        ("source_length", c_void_p),
        *((name, c_void_p) for name in ("id", "at", "turn", "row", "need", "place", "given")),
    ]


class PairsRecord(Structure):
    """The record Pairs of network.h."""

    _fields_ = [
        *((name, c_int32) for name in ("tokens", "beside", "width", "kind")),
        ("join", POINTER(WeightRecord)),
        *((name, c_void_p) for name in ("ids", "embeddings", "states", "joined", "given")),
    ]


class DrawsRecord(Structure):
    """The record Draws of network.h."""

    _fields_ = [
        *((name, c_int32) for name in ("rows", "V")),
        ("p", MatrixRecord),
        *((name, c_void_p) for name in ("u", "ids", "masses")),
    ]


class VerificationRecord(Structure):
    """The record Verification of network.h."""

    _fields_ = [
        *((name, c_int32) for name in ("rule", "rows", "G", "V")),
        *((name, MatrixRecord) for name in ("p", "q")),
        *((name, c_void_p) for name in ("x", "lengths", "accept", "next")),
        *((name, c_void_p) for name in ("survival", "scale", "n", "t", "beta", "masses")),
    ]


@cache
def library() -> ctypes.CDLL:
    """Load the library. Raises RefusedError where it was not compiled, or of other sources, or
    cannot be loaded."""
    checkout = build.SOURCES.is_dir()  # wheels have the library alone
    anew = f"{sys.executable} {build.__file__}" if checkout else "install foretoken again"
    if not FILE.exists():
        raise RefusedError(f"the native decoder was not compiled: {build.REMEDY}; then {anew}")
    try:
        kernels = ctypes.CDLL(str(FILE))
    except OSError as error:
        raise RefusedError(f"the native decoder cannot be loaded: {error}") from None
    kernels.foretoken_digest.restype = ctypes.c_char_p
    if checkout and kernels.foretoken_digest().decode() != build.digest():
        raise RefusedError(f"the native decoder was compiled of other sources: {anew}")
    kernels.foretoken_open.restype = c_void_p
    kernels.foretoken_open.argtypes = [ctypes.c_char_p, POINTER(NetworkRecord)]
    kernels.foretoken_close.argtypes = [c_void_p]
    kernels.foretoken_close.restype = None
    kernels.foretoken_run.argtypes = [c_void_p, POINTER(PassRecord)]
    kernels.foretoken_round_weights.argtypes = [ctypes.c_char_p, c_void_p, c_int64, *[c_void_p] * 2]
    kernels.foretoken_round_weights.restype = None
    kernels.foretoken_chain.argtypes = [c_void_p, POINTER(PassRecord), POINTER(ChainRecord)]
    kernels.foretoken_settle.argtypes = [c_void_p, c_void_p, c_int32]
    kernels.foretoken_settle.restype = None
    kernels.foretoken_join.argtypes = [ctypes.c_char_p, POINTER(PairsRecord)]
    kernels.foretoken_softmax.argtypes = [ctypes.c_char_p, POINTER(SoftmaxRecord)]
    kernels.foretoken_draw.argtypes = [ctypes.c_char_p, POINTER(DrawsRecord)]
    kernels.foretoken_draw.restype = None
    kernels.foretoken_verify.argtypes = [ctypes.c_char_p, POINTER(VerificationRecord)]
    product = kernels.foretoken_product
    product.argtypes = [ctypes.c_char_p, POINTER(WeightRecord), c_void_p, c_int32, c_void_p]
    return kernels


def instruction_sets() -> list[str]:
    """Return the instruction sets that this processor has, the fastest first."""
    return [name for name in SETS if library().foretoken_has(name.encode())]


def chosen_set() -> str:
    """Return the instruction set to run on: the fastest, or the one that the environment names.
    Raises InputError for one that this processor lacks."""
    there, asked = instruction_sets(), os.environ.get(CHOICE)
    if asked and asked not in there:
        raise InputError(f"{CHOICE} is {asked!r:.40}; this processor has {', '.join(there)}")
    return asked or there[0]


class OpenNetwork:
    """A network with its workspace; `kept`: what its pointers are to."""

    def __init__(self, network: NetworkRecord, kept: Any, instructions: str | None = None) -> None:
        self.instructions = instructions or chosen_set()
        self.network, self._kept = network, kept
        kernels = library()  # at the end of the process there may be none
        self._run, self._close = kernels.foretoken_run, kernels.foretoken_close
        self._chain = kernels.foretoken_chain
        self._handle = kernels.foretoken_open(self.instructions.encode(), network)
        if not self._handle:
            raise MemoryError("no memory for the states of a pass")

    def run(self, one: PassRecord) -> None:
        """Run a pass. Raises MemoryError."""
        if not self._run(self._handle, one):
            raise MemoryError("no memory, or no threads, for a pass")

    def chain(self, one: PassRecord, chain: ChainRecord) -> None:
        """Run a pass and a draft's passes after it. Raises MemoryError."""
        if not self._chain(self._handle, one, chain):
            raise MemoryError("no memory, or no threads, for the passes of a draft")

    def settle(self, row: int, length: int) -> None:
        """Bring the recurrent states of a row, at this address, forward to its last token."""
        library().foretoken_settle(self._handle, row, length)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._close(self._handle)
