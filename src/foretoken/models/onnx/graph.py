"""An ONNX graph as it is written: operations by name, and constants, which go to a file of their
own at once, so that a large model is never in memory twice. Knows no models."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

OURS = "com.microsoft"  # ONNX Runtime's own operations
OPSET, IR = 21, 10
ALIGNED = 4096  # bytes at which a constant begins, so that it can be read in place
KINDS = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64, "int32": TensorProto.INT32}
SMALL = 1024  # bytes of a constant that stays in the graph


class Graph:
    """One in the making, in a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.widest = 0  # bits of a weight in a product
        self._weights: IO[bytes] = (folder / f"{name}.weights").open("wb")

    def input(self, name: str, kind: str, *shape: int | str) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, KINDS[kind], list(shape)))
        return name

    def output(self, name: str, kind: str, *shape: int | str) -> None:
        self.outputs.append(helper.make_tensor_value_info(name, KINDS[kind], list(shape)))

    def constant(self, name: str, value: NDArray[Any]) -> str:
        """A constant of that name, which is written once."""
        if name in self.constants:
            return name
        value = np.ascontiguousarray(value)
        kind = helper.np_dtype_to_tensor_dtype(value.dtype)
        tensor = TensorProto(name=name, data_type=kind, dims=value.shape)
        if value.nbytes < SMALL:
            tensor.raw_data = value.tobytes()
        else:
            self._weights.write(bytes(-self._weights.tell() % ALIGNED))
            tensor.data_location = TensorProto.EXTERNAL
            place = {
                "location": f"{self.name}.weights",
                "offset": self._weights.tell(),
                "length": value.nbytes,
            }
            for key, said in place.items():
                tensor.external_data.add(key=key, value=str(said))
            self._weights.write(value.data)
        self.constants[name] = tensor
        return name

    def add(
        self, kind: str, inputs: list[str], *outputs: str, ours: bool = False, **how: Any
    ) -> str:
        """An operation; returns its first output. Inputs and outputs that are left out are ""."""
        domain = OURS if ours else ""
        self.nodes.append(
            helper.make_node(kind, inputs, list(outputs), name=outputs[0], domain=domain, **how)
        )
        return outputs[0]

    def written(self) -> Path:
        """Write the graph beside its constants; returns its file."""
        self._weights.close()
        constants = list(self.constants.values())
        graph = helper.make_graph(self.nodes, self.name, self.inputs, self.outputs, constants)
        sets = [helper.make_opsetid("", OPSET), helper.make_opsetid(OURS, 1)]
        model = helper.make_model(graph, opset_imports=sets, ir_version=IR)
        file = self.folder / f"{self.name}.onnx"
        file.write_bytes(model.SerializeToString())
        return file
