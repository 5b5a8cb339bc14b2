"""The C interface of the compiled kernels (`cpp/network.h`): ctypes mirrors of its structs, and
`OpenNetwork`, which runs forward passes. Callers must check all arguments, because the C++ code
checks none."""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from foretoken.errors import InputError, RefusedError
from foretoken.kernels import build

LIBRARY_FILE = Path(__file__).parent / "kernels.so"
INSTRUCTION_SETS = ("avx512", "avxvnni", "avx2", "portable")  # the fastest first
# environment variable that selects one of INSTRUCTION_SETS
INSTRUCTIONS_VARIABLE = "FORETOKEN_INSTRUCTIONS"


def make_fields(*kinds: tuple[Any, str]) -> list[tuple[str, Any]]:
    """Return the `_fields_` of a ctypes structure, in order. Each argument is a pair of a type and
    the names of the fields of this type, separated by spaces."""
    return [(name, kind) for kind, names in kinds for name in names.split()]


class WeightRecord(Structure):
    """ctypes mirror of struct Weight in network.h: the packed weight of a linear layer or table."""

    _fields_ = make_fields(
        (c_int32, "kind outputs inputs form"),
        (c_void_p, "panels bias rest"),
    )


class NormRecord(Structure):
    """ctypes mirror of struct Norm in network.h: the weights of a norm."""

    _fields_ = make_fields(
        (c_void_p, "weight bias"),
        (c_float, "epsilon"),
        (c_int32, "centred"),
    )


class ExpertsRecord(Structure):
    """ctypes mirror of struct Experts in network.h: a mixture of experts."""

    _fields_ = make_fields(
        (c_int32, "count chosen sigmoids groups chosen_groups normalized shared_gate"),
        (c_float, "scale"),
        (c_void_p, "added"),
        (WeightRecord, "router"),
        (POINTER(WeightRecord), "gate up down"),
    )


class RecurrenceRecord(Structure):
    """ctypes mirror of struct Recurrence in network.h: a short convolution and the recurrence after
    it."""

    _fields_ = make_fields(
        (c_int32, "rule taps key_heads key_width groups count gate_first"),
        (c_float, "epsilon query_scale beta_scale least_step most_step"),
        (c_void_p, "filters filter_bias decay step_bias skip norm"),
        (WeightRecord, "steps"),
        (c_int64, "at"),
    )


class LatentRecord(Structure):
    """ctypes mirror of struct Latent in network.h: attention by latents (MLA)."""

    _fields_ = make_fields(
        (c_int32, "rank query_rank"),
        (WeightRecord, "queries"),
        (POINTER(WeightRecord), "keys values"),
    )


class BlockConvolutionRecord(Structure):
    """ctypes mirror of struct BlockConvolution in network.h: convolutions over a block's tokens."""

    _fields_ = make_fields(
        (c_int32, "taps group"),
        (c_void_p, "base"),
        (WeightRecord, "deltas"),
    )


class LayerRecord(Structure):
    """ctypes mirror of struct Layer in network.h: the weights and settings of a layer."""

    _fields_ = make_fields(
        (NormRecord, "before_attention after_attention before_mlp after_mlp of_queries"),
        (NormRecord, "of_keys of_values"),
        (WeightRecord, "qkv out gate up down"),
        (c_int32, "heads kv_heads width rotary query_rotary rotated interleaved window"),
        (c_int32, "activation parallel"),
        (c_float, "scale softcap residual clip factor"),
        (c_float * 3, "curve"),
        (c_void_p, "sinks slopes"),
        (c_int64, "keys values step"),
        (c_int32, "norms halved source borrowed added_first bias block gate_of_heads"),
        (WeightRecord, "attention_gate"),
        (RecurrenceRecord, "recurrence"),
        (ExpertsRecord, "experts"),
        (LatentRecord, "latent"),
        (WeightRecord, "input_gate input_out"),
        (NormRecord, "after_input"),
        (c_int32, "input"),
        (BlockConvolutionRecord, "attention_conv mlp_conv"),
        (c_void_p, "beside"),
    )


class LayerInputsRecord(Structure):
    """ctypes mirror of struct LayerInputs in network.h: per-layer inputs (Gemma 4)."""

    _fields_ = make_fields(
        (c_int32, "width"),
        (c_float, "table_factor product_factor sum_factor"),
        (WeightRecord, "table product"),
        (NormRecord, "norm"),
    )


class NetworkRecord(Structure):
    """ctypes mirror of struct Network in network.h: a whole network."""

    _fields_ = make_fields(
        (c_int32, "width layers vocabulary threads inner attention most_tokens"),
        (c_float, "embedding_factor logit_factor logit_cap"),
        (WeightRecord, "embeddings positions head"),
        (NormRecord, "embedding_norm last"),
        (POINTER(LayerRecord), "layer"),
        (c_int32, "beside before_last"),
        (NormRecord, "beside_norm state_norm"),
        (WeightRecord, "pair"),
        (c_int32, "encoder first_blocks last_blocks"),
        (LayerInputsRecord, "inputs"),
    )


class PassRecord(Structure):
    """ctypes mirror of struct Pass in network.h: the inputs and outputs of a forward pass."""

    _fields_ = make_fields(
        (c_int32, "tokens needed rows tables"),
        (c_void_p, "ids given at turn row pages rotary need place logits hidden taps"),
        (c_int64, "tap_stride"),
        (c_void_p, "sources source_length biases"),
        (c_int64, "bias_reach bias_stride"),
        (c_void_p, "states ends added"),
    )


class MatrixRecord(Structure):
    """ctypes mirror of struct Matrix in network.h: a strided matrix."""

    _fields_ = make_fields(
        (c_void_p, "numbers"),
        (c_int64, "of_group of_part"),
        (c_int32, "inner"),
    )


class SoftmaxRecord(Structure):
    """ctypes mirror of struct Softmax in network.h: the arguments of a softmax with filters."""

    _fields_ = make_fields(
        (c_int32, "rows V threads top_k"),
        (c_float, "temperature min_p"),
        (c_double, "top_p"),
        (MatrixRecord, "logits"),
        (c_void_p, "p failed"),
    )


class ChainRecord(Structure):
    """ctypes mirror of struct Chain in network.h: the draft tokens that are made after a pass."""

    _fields_ = make_fields(
        (c_int32, "rows steps wide kind"),
        (c_void_p, "budget next apart pages_of sources_of states_of length_of"),
        (SoftmaxRecord, "choice"),
        (c_void_p, "u ids embeddings tokens tops masses q narrow pages sources states"),
        (c_void_p, "source_length id at turn row need place given"),
    )


class PairsRecord(Structure):
    """ctypes mirror of struct Pairs in network.h: inputs that are pairs of an embedding and a
    hidden state."""

    _fields_ = make_fields(
        (c_int32, "tokens beside width kind"),
        (POINTER(WeightRecord), "join"),
        (c_void_p, "ids embeddings states joined given"),
    )


class DrawsRecord(Structure):
    """ctypes mirror of struct Draws in network.h: the arguments of sampling."""

    _fields_ = make_fields(
        (c_int32, "rows V"),
        (MatrixRecord, "p"),
        (c_void_p, "u ids masses"),
    )


class VerificationRecord(Structure):
    """ctypes mirror of struct Verification in network.h: the arguments of verifying draft
    tokens."""

    _fields_ = make_fields(
        (c_int32, "rule rows G V"),
        (MatrixRecord, "p q"),
        (c_void_p, "x lengths accept next survival scale n t beta masses"),
    )


# For each function of the library, the types of its result and of its arguments
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "open": (c_void_p, c_char_p, POINTER(NetworkRecord)),
    "close": (None, c_void_p),
    "run": (c_int32, c_void_p, POINTER(PassRecord)),
    "chain": (c_int32, c_void_p, POINTER(PassRecord), POINTER(ChainRecord)),
    "settle": (None, c_void_p, c_void_p, c_int32),
    "join": (c_int32, c_char_p, POINTER(PairsRecord)),
    "product": (c_int32, c_char_p, POINTER(WeightRecord), c_void_p, c_int32, c_int32, c_void_p),
    "unpack": (None, c_char_p, POINTER(WeightRecord), c_int32, c_void_p),
    "round_weights": (None, c_char_p, c_void_p, c_int64, c_void_p, c_void_p),
    "softmax": (c_int32, c_char_p, POINTER(SoftmaxRecord)),
    "draw": (None, c_char_p, POINTER(DrawsRecord)),
    "verify": (c_int32, c_char_p, POINTER(VerificationRecord)),
}


@cache
def load_library() -> ctypes.CDLL:
    """Return the loaded library. Raises RefusedError if the library was not compiled, was compiled
    from other sources, or cannot be loaded."""
    checkout = build.CPP_FOLDER.is_dir()  # wheels have no sources
    remedy = f"run {sys.executable} {build.__file__}" if checkout else "install foretoken again"
    if not LIBRARY_FILE.exists():
        raise RefusedError(
            f"the native decoder was not compiled: {build.COMPILER_REMEDY}; then {remedy}"
        )
    try:
        kernels = ctypes.CDLL(str(LIBRARY_FILE))
    except OSError as error:
        raise RefusedError(f"the native decoder cannot be loaded: {error}") from None
    kernels.foretoken_digest.restype = c_char_p
    if checkout and kernels.foretoken_digest().decode() != build.compute_digest():
        raise RefusedError(f"the native decoder was compiled from other sources; {remedy}")
    for name, (result, *given) in SIGNATURES.items():
        function = getattr(kernels, f"foretoken_{name}")
        function.restype, function.argtypes = result, given
    return kernels


def list_instruction_sets() -> list[str]:
    """Return the instruction sets that this processor supports, fastest first."""
    return [name for name in INSTRUCTION_SETS if load_library().foretoken_has(name.encode())]


def choose_instruction_set() -> str:
    """Return the instruction set that the environment variable INSTRUCTIONS_VARIABLE selects, else
    the fastest one. Raises InputError if this processor does not
    support the selected instruction set."""
    available, requested = list_instruction_sets(), os.environ.get(INSTRUCTIONS_VARIABLE)
    if requested and requested not in available:
        raise InputError(
            f"{INSTRUCTIONS_VARIABLE} is {requested!r:.40}; give an instruction set that this "
            f"processor supports: {', '.join(available)}"
        )
    return requested or available[0]


class OpenNetwork:
    """A network that is ready to run: the kernels' handle and its workspace.

    network: The struct of the network. owned: Objects that the struct points to; they live as long
    as this object. instructions: The instruction set; None: that of `choose_instruction_set`.
    Raises MemoryError.
    """

    def __init__(self, network: NetworkRecord, owned: Any, instructions: str | None = None) -> None:
        self.instructions = instructions or choose_instruction_set()
        self.network, self._owned = network, owned
        # bound here: at interpreter shutdown, `load_library` may be gone before `__del__`
        kernels = load_library()
        self._run, self._close = kernels.foretoken_run, kernels.foretoken_close
        self._chain = kernels.foretoken_chain
        self._handle = kernels.foretoken_open(self.instructions.encode(), network)
        if not self._handle:
            raise MemoryError("not enough memory for the activations of a forward pass")

    def run(self, record: PassRecord) -> None:
        """Run a forward pass. Raises MemoryError."""
        if not self._run(self._handle, record):
            raise MemoryError("not enough memory or threads for a forward pass")

    def chain(self, record: PassRecord, chain: ChainRecord) -> None:
        """Run a forward pass that makes each row's first draft token, then a forward pass for each
        further draft token. Raises MemoryError."""
        if not self._chain(self._handle, record, chain):
            raise MemoryError("not enough memory or threads for a draft's forward passes")

    def settle(self, row: int, length: int) -> None:
        """Advance the recurrent states of a sequence to the sequence's last token. row: the address
        of the states; length: the number of the sequence's tokens."""
        load_library().foretoken_settle(self._handle, row, length)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._close(self._handle)
