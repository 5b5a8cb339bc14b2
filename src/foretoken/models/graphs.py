"""A decoder-only transformers model as forwards of fixed shapes over a ragged cache whose tensors
stay where they are; on CUDA they are recorded as graphs and replayed.

Rows, widths and slots come in buckets, so that few forwards serve all blocks; prompts are read
without graphs. Shapes never follow from the rows' content: every query reads all the slots, and the
mask, made on the device from each row's length, hides all but its own. A guard names operations
that cannot be recorded. A CPU runs the same forwards unrecorded, for tests. Does not depend on
how tokens are chosen.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from foretoken.errors import RefusedError, kind_of
from foretoken.models.base import Blocks, Capabilities, Model, counts_of
from foretoken.models.rows import BEYOND, check_lengths, check_room, padded
from foretoken.models.stock.attention import Forward, Needed, Read
from foretoken.models.stock.cache import BUCKET, RaggedCache, given, ragged_cache
from foretoken.models.stock.compiled import CompiledLayers
from foretoken.models.stock.model import CausalModel
from foretoken.models.stock.selfcheck import Form
from foretoken.models.stock.sizes import no_logits
from foretoken.transfer import sent


class FixedCache(RaggedCache):
    """A cache that grows by powers of two and never shrinks."""

    def __init__(self, layers: list[Any], device: torch.device) -> None:
        super().__init__(layers, 0, device)

    @property
    def room(self) -> tuple[int, int]:
        """Rows and slots; when it changes, tensors have moved."""
        return self.rows, self.capacity

    def reserve(self, rows: int, slots: int) -> None:
        """Make room, in powers of two."""
        room = max(self.rows, power(rows)), max(self.capacity, bucket(slots))
        if room != self.room:
            self.grow(*room)

    def lay_out(self, offset: Tensor, width: int, end: int) -> None:
        """Put the block's tokens behind `offset [B]`; its values do not change the operations."""
        self.offset, self.width, self.end = offset, width, end
        self.row = torch.arange(len(offset), device=self.device)[:, None]
        self.positions = offset[:, None] + torch.arange(width, device=self.device)


class Recordable(TorchDispatchMode):
    """Refuses operations whose shapes depend on data, that make the host wait or that copy between
    host and device: a graph cannot hold them."""

    BARRED = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)

    def __init__(self, owner: str) -> None:
        super().__init__()
        self.whose = owner

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = str(func)
        if "aten.index" in name:  # its shape depends on data where a mask is an index
            indices = args[1] if isinstance(args[1], list | tuple) else []
            barred = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)
        elif "copy" in name:  # refused before a recording, which fails as a whole and spoils more
            barred = crosses(args, kwargs or {})
        else:
            barred = any(tag in func.tags for tag in self.BARRED)
        if barred:
            raise RefusedError(
                f"{self.whose} cannot be run in fixed shapes: its work depends on what it computes "
                f"({name}); give runtime='transformers'"
            )
        with self:  # the parts of an operation are checked as well
            result = func.decompose(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is NotImplemented else result


def crosses(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a copy goes from one kind of device to another."""
    places = {x.device.type for x in args if isinstance(x, Tensor)}
    if kwargs.get("device") is not None:
        places.add(torch.device(kwargs["device"]).type)
    return len(places) > 1


def power(n: int) -> int:
    """The smallest power of two from n on; 0 for 0."""
    return 1 << (n - 1).bit_length() if n else 0


def bucket(slots: int) -> int:
    """The smallest capacity for so many slots: 64 times a power of two."""
    return BUCKET * power(-(-slots // BUCKET))


def wide(tokens: int) -> int:
    """The smallest width for so many: 1, 2, 3, 5, 9, 17, .., for gammas of 0 and powers of two."""
    return tokens if tokens < 2 else 1 + power(tokens - 1)


Made = tuple[Tensor, Tensor]  # logits [rows, width, V] and what the output layer read

RECORDING = Lock()  # each begins with a wait for the whole device
SHORT = [[0]], [[0, 0]]  # blocks of a rehearsal
ROUNDING = 0.1  # of the spread of logits; in bfloat16, 46 layers made 0.03
WIDEST = 33  # tokens; longer blocks, of rows that catch up, are too rare to be worth recording


class GraphModel(Model):
    """A twin of `model`, whose weights it shares.

    A pass of B rows, W tokens and S slots runs over the first rows and slots of the same buffers,
    so that rows may leave, and texts be short, without another recording; only growth discards the
    recordings. `compiled`: torch compiles the layers first, once or twice, for seconds each. Raises
    RefusedError for what cannot be run in fixed shapes.
    """

    capabilities = Capabilities(tensors=True, hidden=True)

    def __init__(self, model: PreTrainedModel, compiled: bool = False) -> None:
        if model.config.is_encoder_decoder:
            raise RefusedError("graphs serve decoder-only models; give runtime='transformers'")
        self.eager = CausalModel(model)
        self.model, self.device = model, self.eager.device
        self.computed = self.eager.computed
        self.context, self._longest = self.eager.context, self.eager.longest
        self.vocab_size = self.eager.vocab_size
        self.running = Forward(model)
        self.cache = FixedCache(ragged_cache(model, 0).layers, self.device)
        self.layers = CompiledLayers(self.running.model, self.cache) if compiled else None
        self.runtime = "compiled" if compiled else "graphs"
        self.passes: dict[tuple[int, int, int], Pass] = {}  # by rows, width and slots
        self.room = self.cache.room  # for which they were made
        self.pool: Any = None
        self.offset: Tensor | None = None  # lengths by place, on the device; None: not sent yet

    @property
    def lengths(self) -> list[int]:
        return self.cache.lengths

    @property
    def long(self) -> list[bool]:
        return self.cache.long

    def beyond(self, on: bool) -> None:
        self.eager.beyond(on)

    @torch.inference_mode()
    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        self.cache.join(self.eager.read(prompts))
        self.offset = None

    @torch.inference_mode()
    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        counts = counts_of(blocks, need)
        check_room(self.lengths, counts, self.limits(self.long))
        B, most = len(counts), max(counts, default=0)
        if not most:
            return no_logits(self.model, B)
        self.cache.close()
        ids = self.cache.placed(padded(blocks, self.device)[:, :most])
        width = wide(most)
        self.padding = power(B) * width - sum(counts)
        end = bucket(max(self.cache.lengths) + width)
        self.cache.reserve(B, end)
        logits, hidden = self._pass(power(B), width, end)(ids, self._lengths(), self._firsts())
        self._advance(counts)
        needed = Needed(counts, need, self.cache.places, self.device)
        self._hidden = needed.of(hidden[:B])
        return needed.of(logits[:B])

    def set_lengths(self, lengths: list[int]) -> None:
        check_lengths(self.cache.lengths, lengths)
        if lengths != self.cache.lengths:
            self.cache.lengths, self.offset = list(lengths), None

    @torch.inference_mode()
    def permute(self, rows: list[int]) -> None:
        self.cache.select(rows)
        self.offset = None

    def _lengths(self) -> Tensor:
        if self.offset is None:
            lengths = [self.cache.lengths[b] for b in self.cache.order]
            self.offset = sent(torch.tensor(lengths), self.device)
        return self.offset

    def _firsts(self) -> Tensor | None:
        """The position of every place's first token, on the device; None: of all it is 0."""
        if not any(self.long):
            return None
        return sent(torch.tensor([BEYOND * self.long[b] for b in self.cache.order]), self.device)

    def _advance(self, counts: list[int]) -> None:
        """Rows that grow alike are counted on the device, so that nothing need be sent."""
        self.cache.advance(counts)
        even = min(counts) == max(counts)
        self.offset = self.offset + counts[0] if even and self.offset is not None else None

    def _pass(self, rows: int, width: int, end: int) -> Pass:
        if self.room != self.cache.room:  # recordings write to where the cache was
            self.passes.clear()
            self.room = self.cache.room
            self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        if (rows, width, end) not in self.passes:
            layers = self.layers if width <= WIDEST else None

            def forward(ids: Tensor, lengths: Tensor, firsts: Tensor, watched: bool) -> Made:
                with nullcontext() if layers is None or watched else layers.on():
                    return self._forward(ids, lengths, firsts, end)

            guard = Recordable(type(self.model).__name__)
            shape = rows, width
            self.passes[rows, width, end] = Pass(forward, guard, shape, self.device, self.pool)
        return self.passes[rows, width, end]

    def _forward(self, ids: Tensor, lengths: Tensor, firsts: Tensor, end: int) -> Made:
        """Run tokens behind `lengths` others; no shape depends on their values."""
        self.cache.lay_out(lengths, ids.shape[1], end)
        positions = self.cache.positions
        if self._longest is not None:
            positions = positions.clamp(max=self._longest - 1)  # padding only
        if self._longest != self.context:
            positions = positions + firsts[:, None]
        read = Read()
        with self.running(self.cache, read) as model:
            logits = model(
                input_ids=ids,
                position_ids=positions,
                **given(self.model, self.cache),
                use_cache=True,
                return_dict=True,
            ).logits
        self.cache.advance([0] * len(self.cache.lengths))
        return logits, read.hidden


class Pass:
    """A forward over buffers of its own, `[rows, width]` ids and `[rows]` lengths and first
    positions.

    Its first run is watched by `guard`. On CUDA it is then recorded, and from then on replayed:
    the next run overwrites what it returned.
    """

    def __init__(
        self,
        forward: Callable[[Tensor, Tensor, Tensor, bool], Made],
        guard: Recordable,
        shape: tuple[int, int],
        device: torch.device,
        pool: Any,
    ) -> None:
        self.forward, self.pool = forward, pool
        self.ids = torch.zeros(shape, dtype=torch.long, device=device)
        self.lengths = torch.zeros(shape[0], dtype=torch.long, device=device)
        self.firsts = torch.zeros_like(self.lengths)
        self.guard: Recordable | None = guard
        self.graph: Any = None
        self.made: Made = torch.empty(0), torch.empty(0)

    def __call__(self, ids: Tensor, lengths: Tensor, firsts: Tensor | None) -> Made:
        """Rows and columns that are not given are padding, of id 0: an old id may be one whose keys
        and values are NaN, which a mask hides but does not keep from a sum."""
        self.ids.zero_()
        self.ids[: ids.shape[0], : ids.shape[1]] = ids
        self.lengths[: len(lengths)] = lengths
        self.firsts.zero_()
        if firsts is not None:
            self.firsts[: len(firsts)] = firsts
        if self.guard is not None:
            with self.guard:
                output = self.run(watched=True)
            self.guard = None
            if self.pool is None or self.ids.shape[1] > WIDEST:
                return output
            self._record()
        if self.graph is None:
            return self.run()
        self.graph.replay()
        return self.made

    def run(self, watched: bool = False) -> Made:
        """Run the forward; not under `guard`, its layers may be compiled."""
        return self.forward(self.ids, self.lengths, self.firsts, watched)

    def _record(self) -> None:
        """Record, after runs that let libraries choose their kernels; each writes the same keys and
        values to the same slots."""
        with RECORDING, torch.cuda.device(self.ids.device):
            side = torch.cuda.Stream()  # as CUDA asks
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self.run()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            mode = "thread_local"  # other threads may go on, but for waits for the whole device
            with undisturbed(), torch.cuda.graph(graph, pool=self.pool, capture_error_mode=mode):
                self.made = self.run()
            self.graph = graph


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keep garbage collection from a recording: an old graph that it frees would spoil this one."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def rehearsed(model: GraphModel) -> GraphModel:
    """The same model, after short passes were recorded; RefusedError where they cannot be."""
    try:
        model.start([[0]])
        for blocks in SHORT:
            model.score(blocks, [1])
        model.leave([0])
        if model.layers is not None:
            _compare(model, model.layers)
    except RefusedError:
        raise
    except Exception as error:  # recording raises many kinds
        raise RefusedError(f"it cannot be recorded as a graph: {kind_of(error)}") from error
    return model


def _compare(model: GraphModel, layers: CompiledLayers) -> None:
    """Refuse compiled layers whose logits are not, but for rounding, those of the ragged cache."""
    plain = CausalModel(model.model)
    for runner in (model, plain):
        runner.start([[0]])
    for blocks in SHORT:
        need = [len(blocks[0])]
        ours, theirs = model.score(blocks, need), plain.score(blocks, need)
        apart, spread = (ours - theirs).abs().max(), theirs.max() - theirs.min()
        if not layers.refused and float(apart) > ROUNDING * float(spread):
            layers.refuse(f"logits differ by {float(apart / spread):.1e} of their spread")
            model.passes.clear()
    model.leave([0])
    if layers.refused:
        model.runtime = "graphs"


ON_GRAPHS = Form("fixed shapes", GraphModel, switches=True)
