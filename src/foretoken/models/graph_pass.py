"""A forward pass of fixed shapes with its input buffers, which is recorded as a CUDA graph on CUDA,
and a guard that refuses operations that cannot be recorded."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foretoken.errors import RefusedError, log_error_kind

# a recording begins by synchronizing the device, which another recording forbids
RECORDING_LOCK = Lock()


class RecordingGuard(TorchDispatchMode):
    """Refuses operations that a CUDA graph cannot contain: operations whose shapes depend on data,
    that make the host wait, or that copy between host and device. Raises RefusedError, which
    names the model `owner`."""

    BARRED_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)

    def __init__(self, owner: str) -> None:
        super().__init__()
        self.owner = owner

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = str(func)
        if "aten.index" in name:  # its shape depends on data if an index is a boolean mask
            indices = args[1] if isinstance(args[1], list | tuple) else []
            barred = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)
        elif "copy" in name:  # a forbidden copy would break more than the recording
            barred = copies_between_devices(args, kwargs or {})
        else:
            barred = any(tag in func.tags for tag in self.BARRED_TAGS)
        if barred:
            raise RefusedError(
                f"{self.owner} cannot be run in fixed shapes: its operations depend on computed "
                f"values ({name}); give runtime='transformers'"
            )
        with self:  # check the parts of a composite operation as well
            result = func.decompose(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is NotImplemented else result


def copies_between_devices(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a copy with these arguments is between two types of device, such as CPU and
    CUDA."""
    device_types = {x.device.type for x in args if isinstance(x, Tensor)}
    if kwargs.get("device") is not None:
        device_types.add(torch.device(kwargs["device"]).type)
    return len(device_types) > 1


class GraphPass:
    """A forward pass, or a chain of them, with its own input buffers, `inputs`.

    `guard` checks the operations of the first run. Once there is a memory `pool`, the pass is
    recorded, and all later runs replay the recording. Each run overwrites the outputs of the
    previous run.
    """

    def __init__(
        self, forward: Callable[..., Any], guard: RecordingGuard, inputs: list[Tensor], pool: Any
    ) -> None:
        """forward: takes the inputs, and `watched` (see `run`). inputs: the buffers; the forward
        pass runs on the device of the first buffer."""
        self.forward, self.inputs, self.pool = forward, inputs, pool
        self.guard: RecordingGuard | None = guard
        self.graph: Any = None
        self.outputs: Any = None

    def __call__(self, *inputs: Tensor | None) -> Any:
        """Return the outputs for these inputs, which have at most the sizes of their buffers; None:
        zeros."""
        self.fill(*inputs)
        if self.guard is not None:
            with self.guard:
                output = self.run(watched=True)
            self.guard = None
            if self.pool is None:
                return output
        if self.pool is None:
            return self.run()
        if self.graph is None:
            self.graph = self._record()
        self.graph.replay()
        return self.outputs

    def fill(self, *inputs: Tensor | None) -> None:
        """Copy inputs to the first entries of their buffers. Set the other entries to 0: an id left
        over from the previous run may give NaN values, and NaN stays NaN even with an attention
        weight of 0."""
        for buffer, new in zip(self.inputs, inputs, strict=True):
            buffer.zero_()
            if new is not None:
                buffer[tuple(map(slice, new.shape))] = new

    def run(self, watched: bool = False) -> Any:
        """Run the forward pass. watched: True if `guard` checks the operations; the layers then run
        uncompiled."""
        return self.forward(*self.inputs, watched=watched)

    def _record(self) -> Any:
        """Record a graph and return it, after two warm-up runs in which libraries choose their
        kernels. Each run writes the same keys and values to the same positions, so the repetitions
        do no harm."""
        with RECORDING_LOCK, torch.cuda.device(self.inputs[0].device):
            side = torch.cuda.Stream()  # CUDA requires warm-up on a side stream
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self.run()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            mode = "thread_local"  # other threads may use CUDA, except to synchronize the device
            with (
                pause_garbage_collection(),
                torch.cuda.graph(graph, pool=self.pool, capture_error_mode=mode),
            ):
                self.outputs = self.run()
            return graph


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Pause garbage collection during a recording, which would fail if an old graph was freed."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def refuse_failed_recording(owner: str) -> Iterator[None]:
    """Raise RefusedError, which names the model `owner`, if a recording fails."""
    try:
        yield
    except RefusedError:
        raise
    except Exception as error:  # recording raises many classes of errors
        problem = f"{owner} cannot be recorded as a CUDA graph: {log_error_kind(error)}"
        raise RefusedError(problem) from error


def make_memory_pool(device: torch.device) -> Any:
    """Return a new memory pool for recordings; None on a CPU, where nothing is recorded."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None
