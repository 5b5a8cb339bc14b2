"""Weights in a folder, by name, without a model: read one by one, mapped from disk."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from foretoken.errors import InputError, one_line

FILES = ("model.safetensors", "pytorch_model.bin")  # and their indices


class Weights:
    """The weights of a folder. Raises InputError where it holds none, or they cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def _places(self) -> dict[str, Path]:
        """The file of each weight."""
        try:
            for name in FILES:
                if (index := self.folder / f"{name}.index.json").exists():
                    named = json.loads(index.read_text())["weight_map"]
                    return {key: self.folder / file for key, file in named.items()}
                if (file := self.folder / name).exists():
                    return dict.fromkeys(_keys(file), file)
        except Exception as error:  # of the libraries, of many kinds
            raise self._refusal(error) from None
        raise InputError(f"{self.folder} holds no weights ({' or '.join(FILES)})")

    @property
    def keys(self) -> Iterable[str]:
        """Names of all weights."""
        return self._places.keys()

    @property
    def dtypes(self) -> dict[str, str]:
        """The dtypes of all weights by their names, as the files' headers have them."""
        try:
            files = {*self._places.values()}
            held = {key: kind for file in files for key, kind in _dtypes(file).items()}
        except Exception as error:  # as above
            raise self._refusal(error) from None
        return held

    def read(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """Return the weights of these names."""
        by_file: dict[Path, list[str]] = {}
        for key in keys:
            by_file.setdefault(self._places[key], []).append(key)
        try:
            return {k: x for file, some in by_file.items() for k, x in _tensors(file, some).items()}
        except Exception as error:  # as above
            raise self._refusal(error) from None

    def _refusal(self, error: Exception) -> InputError:
        return InputError(
            f"the weights in {self.folder} cannot be read: {one_line(error)}; fetch them again"
        )


def _keys(file: Path) -> list[str]:
    if file.suffix == ".bin":
        return list(torch.load(file, map_location="cpu", weights_only=True, mmap=True))
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())


def _dtypes(file: Path) -> dict[str, str]:
    if file.suffix == ".bin":
        held = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        return {key: str(tensor.dtype) for key, tensor in held.items()}
    with safe_open(file, framework="pt") as opened:
        return {key: opened.get_slice(key).get_dtype() for key in opened.keys()}


def _tensors(file: Path, keys: list[str]) -> dict[str, Tensor]:
    if file.suffix == ".bin":
        held = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        return {key: held[key] for key in keys}
    with safe_open(file, framework="pt") as opened:
        return {key: opened.get_tensor(key) for key in keys}
