"""Every kernel of every instruction set that this processor has equals the reference to the bit, on
ordinary numbers and on the worst."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from foretoken.kernels import library, reference
from foretoken.models.native.network import ACTIVATIONS, XIELU
from foretoken.models.native.packing import (
    CODEBOOKS,
    FORM_HALVES,
    FORM_OFFSETS,
    FORM_SUPER,
    FORM_WIDE,
    STORAGE_KINDS,
    Panels,
    pack_floats,
    pack_integers,
)

pytestmark = [pytest.mark.cpu_only, pytest.mark.prove]  # compiling takes half a minute
EXTREMES = (0, 1e-40, -1e-42, np.inf, -np.inf, np.nan, 3e38, 1e-30)
SLACK = np.zeros(8192, np.uint8)  # prefetches read behind the last panel
each_set = pytest.mark.parametrize("instructions", library.INSTRUCTION_SETS)


@pytest.fixture(autouse=True)
def there(request: pytest.FixtureRequest, compiled: None) -> None:
    """Sets that this processor lacks are skipped."""
    name = request.getfixturevalue("instructions")
    if name not in library.list_instruction_sets():
        pytest.skip(f"this processor has no {name}")


def pointer(array: Any) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


def same(made: Any, expected: Any) -> bool:
    """Equal to the bit; one NaN is as good as another."""
    if made.dtype == np.float32:
        both = np.isnan(made) & np.isnan(expected)
        return bool(((made.view(np.int32) == expected.view(np.int32)) | both).all())
    return bool((made == expected).all())


def states(n: int, K: int, *, extreme: bool) -> Any:
    random = np.random.default_rng(n * K)
    x = random.standard_normal((n, K)) * random.choice([1e-3, 1, 100], (n, 1))
    x = x.astype(np.float32)
    for value in EXTREMES if extreme else ():
        x.reshape(-1)[random.integers(0, x.size)] = value
    return x


@each_set
@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("K", [1, 32, 40, 64, 576])
def test_states_are_rounded_as_defined(instructions: str, K: int, extreme: bool) -> None:
    x = states(3, K, extreme=extreme)
    blocks = -(-K // 32)
    q, z = np.zeros((3, blocks * 32), np.int8), np.zeros((3, blocks * 2), np.int32)
    d, s = np.zeros((2, 3, blocks), np.float32)
    made = q, d, s, z
    library.load_library().foretoken_round(
        instructions.encode(), pointer(x), 3, K, *map(pointer, made)
    )
    assert all(map(same, made, reference.round_states(x)))


def packed(kind: str, form: int, N: int, K: int) -> tuple[Panels, Any]:
    """A random weight, and what it multiplies to by the reference."""
    random = np.random.default_rng(K + form)
    if kind in ("float32", "float16", "bfloat16"):
        w = random.standard_normal((N, K)).astype(np.float32)
        w[:, ::7] *= np.float32(1e-6)  # subnormal in float16
        if kind == "float16":
            short = w.astype(np.float16)
            long = short.astype(np.float32)
            return pack_floats(short, kind), lambda x: reference.multiply_floats(long, x)
        if kind == "float32":
            return pack_floats(w, kind), lambda x: reference.multiply_floats(w, x)
        upper = w.view(np.uint32) >> 16
        short = (upper << 16).view(np.float32)
        return pack_floats(upper.astype(np.uint16), kind), (
            lambda x: reference.multiply_floats(short, x)
        )
    bits = int(kind[-1])
    blocks = -(-K // (16 if form & FORM_HALVES else 32))
    scales, offsets = random.standard_normal((2, N, blocks)).astype(np.float16).astype(np.float32)
    if form & FORM_WIDE:
        scales = scales * np.float32(1.0001)
    low = 0 if form & FORM_OFFSETS or kind in CODEBOOKS else -(2 ** (bits - 1))
    q = random.integers(low, low + 2**bits, (N, K))
    whole = np.array(CODEBOOKS[kind])[q] if kind in CODEBOOKS else q
    if not form & FORM_SUPER:
        added = offsets if form & FORM_OFFSETS else None
        return pack_integers(q, scales, added, kind=kind), (
            lambda x: reference.multiply_integers(whole, scales, added, x)
        )
    both = random.integers(-128, 128, (2, N, blocks)).astype(np.int8)
    supers = list(random.standard_normal((2, N, K // 256)).astype(np.float16))
    scales, offsets = (
        reference.multiply_levels(both[0], supers[0]),
        reference.multiply_levels(both[1], supers[1]),
    )
    added = offsets if form & FORM_OFFSETS else None
    short = both[1] if form & FORM_OFFSETS else None
    return pack_integers(
        q, both[0], short, kind=kind, supers=supers[: 1 + (form & FORM_OFFSETS)]
    ), (lambda x: reference.multiply_integers(whole, scales, added, x))


FORMS = [(kind, form) for kind in ("int8", "int6", "int5", "int4") for form in range(16)]
FORMS += [(kind, form) for kind in CODEBOOKS for form in (0, FORM_WIDE, FORM_HALVES, FORM_SUPER)]
FORMS = [(kind, form) for kind, form in FORMS if not (form & FORM_SUPER and form & FORM_WIDE)]
NUMBERS = [("float32", 0), ("bfloat16", 0), ("float16", 0)]


@each_set
@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize(("kind", "form"), [*NUMBERS, *FORMS])
def test_products_are_as_defined(instructions: str, kind: str, form: int, extreme: bool) -> None:
    """Over as many tokens as one tile has, fewer and more, and widths that are no full block."""
    for K in (256, 512) if form & FORM_SUPER else (32, 40, 96):
        panels, multiply = packed(kind, form, 80, K)
        data = np.concatenate([panels.data, SLACK])
        weight = library.WeightRecord(
            STORAGE_KINDS[kind], panels.outputs, K, panels.form, data.ctypes.data, None, None
        )
        for n in (1, 2, 3, 8, 13):
            x = states(n, K, extreme=extreme)
            y = np.zeros((n, panels.outputs), np.float32)
            with np.errstate(all="ignore"):
                expected = multiply(x)
            for threads in (1, 2):
                library.load_library().foretoken_product(
                    instructions.encode(), ctypes.byref(weight), pointer(x), n, threads, pointer(y)
                )
                assert same(y[:, :80], expected)


@each_set
@pytest.mark.parametrize("name", [*ACTIVATIONS, XIELU])
def test_activations_are_as_defined(instructions: str, name: str) -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal(4000) * random.choice([1e-3, 1, 10, 100], 4000)
    special = [0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 88, -87, 89, -200, 3e38, -3e38]
    x = np.concatenate([x, special, np.zeros(4)]).astype(np.float32)
    y = np.zeros_like(x)
    call = library.load_library().foretoken_activate
    curve = np.array([0.8, 1.3, 0.5], np.float32)
    number = [*ACTIVATIONS, XIELU].index(name)
    call(instructions.encode(), number, pointer(curve), pointer(x), len(x), pointer(y))
    assert same(y, reference.activate(name, x, curve))


@each_set
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("n", [7, 16, 100, 576])
def test_norms_are_as_defined(instructions: str, centred: bool, biased: bool, n: int) -> None:
    random = np.random.default_rng(n)
    whole = -(-n // 16) * 16
    for scale in (1, 1e-25, 1e20):
        arrays = np.zeros((3, whole), np.float32)
        arrays[:, :n] = random.standard_normal((3, n))
        x, weight, bias = arrays
        x *= np.float32(scale)
        own = bias if biased else None
        norm = library.NormRecord(
            weight.ctypes.data, None if own is None else own.ctypes.data, 1e-5, int(centred)
        )
        y = np.zeros(whole, np.float32)
        call = library.load_library().foretoken_normalize
        call(instructions.encode(), ctypes.byref(norm), pointer(x), n, pointer(y))
        shown = None if own is None else own[:n]
        assert same(y[:n], reference.normalize(x[None, :n], weight[:n], shown, 1e-5, centred)[0])
