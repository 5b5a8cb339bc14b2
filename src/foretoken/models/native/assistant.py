"""Gemma 4's assistants on the native decoder: draft models that attend to the pages of the target
and write none.

Each draft token takes one pass over a token after the end of each sequence. Its input is an
embedding and a hidden state of the target's width, which a product brings to the assistant's width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foretoken.errors import InputError
from foretoken.models.base import Model
from foretoken.models.native.model import NativeModel, PackedProduct
from foretoken.models.native.network import Decoder, PairInputs
from foretoken.models.native.network_reader import NetworkReader
from foretoken.models.native.passes import NativePasses, SequencePart
from foretoken.models.stock.assistant import Assistant, CentroidHead
