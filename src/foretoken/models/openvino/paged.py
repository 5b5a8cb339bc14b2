"""A decoder on OpenVINO's paged attention, behind the Model protocol.

Keys and values live in pages of 32 tokens (OpenVINO calls them blocks); a row is a list of pages
and a length. One flat pass takes the new tokens of all rows, whatever their lengths; rollback is a
smaller length, and copied rows share pages until one of them writes. It does not know where its
graph came from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, chain
from math import prod
from typing import Any

import numpy as np
import openvino as ov
import torch
from numpy.typing import NDArray
from openvino import opset13 as ops
from openvino._offline_transformations import paged_attention_transformation
from torch import Tensor

from foretoken.models.base import Blocks
from foretoken.models.openvino.prefixes import Prefixes
from foretoken.models.rows import CHUNK, check_lengths, check_room, staying

KEY_CACHE, WINDOW = 3, 10  # inputs of the PagedAttentionExtension operator
PAGE = 2  # dimension of the cache [pages, heads, tokens of a page, width]
FIRST = 16  # pages to begin with; the pool then grows by half
MOST = 16  # tokens added to a pass
LINE = 64  # bytes of a cache line
BITS = {1: np.uint8, 2: np.float16, 4: np.float32, 8: np.float64}  # by bytes
SLACK = 1.2e7  # parameters a layer whose products for one token cost as much as a new layout


def paged(graph: ov.Model, windows: list[int]) -> ov.Model:
    """The same graph over paged attention, each layer with its sliding window (0: none)."""
    paged_attention_transformation(graph)
    for op in graph.get_ordered_ops():
        if "PagedAttention" in op.get_type_name():
            names = op.input_value(KEY_CACHE).get_names()
            layer = int(next(name for name in names if "key_cache" in name).split(".")[1])
            if windows[layer]:
                window: Any = ops.constant(np.array(windows[layer], dtype=np.int32))
                op.input(WINDOW).replace_source_output(window.output(0))
    graph.validate_nodes_and_infer_types()
    return graph


@dataclass(slots=True)
class Pool:
    """Pages of keys and values, with the same numbers in every layer, and which rows hold them."""

    request: ov.InferRequest
    names: list[str]
    size: int = 0  # pages in every layer
    goal: int = 0  # the size after growing, which may have been broken off
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    holders: list[int] = field(default_factory=list)  # rows per page
    prefixes: Prefixes | None = None  # None: nothing is kept of texts that have left
    left: dict[int, int] = field(default_factory=dict)  # when a row left a page last
    clock: int = 0

    def take(self) -> int:
        if not self.free:
            self.grow()
        page = self.free.pop()
        if self.prefixes is not None:
            self.prefixes.forget(page)
        self.holders[page] = 1
        return page

    def share(self, pages: list[int]) -> None:
        """Another row holds these pages, which may be free."""
        taken = set(pages)
        self.free = [page for page in self.free if page not in taken]
        for page in pages:
            self.holders[page] += 1

    def leave(self, pages: list[int]) -> None:
        """A row is about to leave these pages."""
        self.clock += 1
        self.left.update(dict.fromkeys(pages, self.clock))

    def own(self, pages: list[int], i: int) -> None:
        """Copy page i of a row, which is about to be written to, if other rows hold it too."""
        shared = pages[i]
        if self.holders[shared] == 1:
            return
        fresh = self.take()
        for array in self.arrays.values():
            array[fresh] = array[shared]
        pages[i] = fresh
        self.holders[shared] -= 1  # last: broken off before, a page is idle until rows change

    def counted(self, rows: list[list[int]]) -> tuple[list[int], list[int]]:
        """`holders` and `free` where these are all the rows, as their pages."""
        holders = [0] * self.size
        for page in chain.from_iterable(rows):
            holders[page] += 1
        free = [page for page in reversed(range(self.size)) if not holders[page]]
        if self.prefixes is not None:  # what is known goes last: first what was left long ago
            free.sort(key=self._worth, reverse=True)
        return holders, free

    def _worth(self, page: int) -> tuple[int, int]:
        assert self.prefixes is not None
        depth = self.prefixes.depth(page)
        return (self.left.get(page, 0), -depth) if depth else (-1, 0)

    def reserve(self, pages: int) -> None:
        """So many pages at least, at once; untouched they take no memory."""
        self.goal = max(self.size, pages)
        self.fit()

    def grow(self) -> None:
        self.goal = max(FIRST, self.size + self.size // 2)
        self.fit()

    def fit(self) -> None:
        """Bring every layer to the goal, also after growing was broken off: where keys and values
        have different sizes, OpenVINO computes nothing, without an error."""
        if self.size == self.goal:
            return
        for name in self.names:
            if name not in self.arrays or len(self.arrays[name]) != self.goal:
                self._widen(name)
        more = range(self.goal - 1, self.size - 1, -1)
        # At once: broken off in between, a page would be free twice
        self.free, self.holders, self.size = (
            [*self.free, *more],
            [*self.holders, *[0] * len(more)],
            self.goal,
        )

    def _widen(self, name: str) -> None:
        port = self.request.get_compiled_model().input(name)
        shape = [self.goal, *(d.get_length() for d in list(port.get_partial_shape())[1:])]
        array, bigger = blank(shape, port.get_element_type())
        if self.size:
            array[: self.size] = self.arrays[name]
        self.request.set_tensor(name, bigger)
        self.arrays[name] = array


class PagedModel:
    """Model protocol over `compiled`, which `paged` made; `facts` are the export's."""

    encoder_decoder = False
    source_context: int | None = None
    source_vocab_size: int | None = None
    runtime = "openvino"
    takes_tensors = False
    device = torch.device("cpu")

    def __init__(self, compiled: ov.CompiledModel, facts: dict[str, Any]) -> None:
        self.vocab_size: int = facts["vocab_size"]
        self.context: int | None = facts["context"]
        self.identity: str | None = facts.get("identity")  # what its speed follows from
        self.computed: str = facts.get("computed", "float32")
        self.request = compiled.create_infer_request()
        self.page = int(compiled.input("key_cache.0").get_partial_shape()[PAGE].get_length())
        kinds = {p.get_any_name(): p.get_element_type() for p in compiled.inputs}
        self.pool = Pool(self.request, [name for name in kinds if "cache." in name])
        self.page_bytes = page_bytes(compiled, self.pool.names)
        self.kinds = {name: k.to_dtype() for name, k in kinds.items() if "cache." not in name}
        self.buffers: dict[tuple[str, int], tuple[NDArray[Any], ov.Tensor]] = {}
        self.bound: dict[str, int] = {}  # sizes of the buffers that the request reads now
        self.slack = min(MOST, int(SLACK * len(facts["windows"]) / facts["parameters"]))
        self.added = 0  # tokens, since a pass of this size was needed
        self.padding = 0
        self.lengths: list[int] = []
        self.pages: list[list[int]] = []  # of every row
        self.texts: list[list[int]] = []  # whose keys and values are there
        self.salts: list[str] = []
        self.salt = ""  # of the rows that join next
        self.recalled: list[int] = []  # tokens of the rows that joined last
        self.need: list[int] = []  # positions of every row in the last score

    @property
    def hidden(self) -> Tensor:
        return ragged(self._output("hidden", sum(self.need)), self.need)

    def memory(self, lengths: list[int], sources: list[int]) -> int:
        # the row that comes last in a pass takes its padding
        pages = sum(-(-(length + MOST) // self.page) for length in lengths)
        return pages * self.page_bytes

    def reserve(self, total: int) -> None:
        self.pool.reserve(total // self.page_bytes)

    def remember(self, on: bool) -> None:
        self.pool.prefixes = Prefixes() if on else None

    def salted(self, salt: str) -> None:
        self.salt = salt

    def known(self, prompt: list[int]) -> int:
        return len(self._found(prompt, self.salt)) * self.page

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        check_room([0] * len(prompts), [len(p) for p in prompts], self.context)
        first, rows = len(self.lengths), range(len(prompts))
        # at once, for a Ctrl-C in between
        self.texts, self.salts, self.pages, self.lengths = (
            [*self.texts, *([] for _ in rows)],
            [*self.salts, *(self.salt for _ in rows)],
            [*self.pages, *([] for _ in rows)],
            [*self.lengths, *(0 for _ in rows)],
        )
        known: dict[int, int] = {}
        for part in self._apart(dict(enumerate(prompts, first))):
            known |= {b: self._recall(b, prompt) for b, prompt in part}
            for blocks in passes([(b, prompt[known[b] :]) for b, prompt in part]):
                self._run(blocks, [0])
            for b, _ in part:
                self._note(b)
        self.recalled = [known[b] for b in sorted(known)]

    def _apart(self, prompts: dict[int, list[int]]) -> Iterator[list[tuple[int, list[int]]]]:
        """Prompts of rows to read together; first those that the others may share pages of."""
        begins = {b: tuple(prompt[: self.page]) for b, prompt in prompts.items()}
        firsts = {begin: b for b, begin in reversed(begins.items()) if len(begin) == self.page}
        shares = self.pool.prefixes is not None
        later = {b for b, begin in begins.items() if shares and firsts.get(begin, b) != b}
        yield [(b, prompt) for b, prompt in prompts.items() if b not in later]
        yield [(b, prompts[b]) for b in sorted(later)]

    def _recall(self, b: int, prompt: list[int]) -> int:
        """Let a fresh row share the pages of texts that began alike; the tokens in them."""
        pages = self._found(prompt, self.salts[b])
        self.pool.share(pages)
        known = len(pages) * self.page
        self.pages[b], self.texts[b], self.lengths[b] = pages, prompt[:known], known
        return known

    def _found(self, prompt: list[int], salt: str) -> list[int]:
        prefixes = self.pool.prefixes
        return [] if prefixes is None else prefixes.find(prompt, self.page, salt)

    def _note(self, b: int) -> None:
        """Others may share a row's whole pages from now on."""
        if self.pool.prefixes is not None:
            text = self.texts[b][: self.lengths[b]]
            self.pool.prefixes.note(text, self.pages[b], self.page, self.salts[b])

    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        assert isinstance(blocks, list)
        check_room(self.lengths, [len(block) for block in blocks], self.context)
        parts = [(b, block) for b, block in enumerate(blocks) if block]
        if not parts:
            return torch.zeros(len(blocks), 0, self.vocab_size)
        ends = accumulate(len(block) for _, block in parts)
        counts = [need[b] for b, _ in parts]
        places = [i for end, n in zip(ends, counts, strict=True) for i in range(end - n, end)]
        flat = self._run(parts, places or [0])
        if not places:
            return torch.zeros(len(blocks), 0, self.vocab_size)
        self.need = list(need)
        return ragged(flat, need)

    def set_lengths(self, lengths: list[int]) -> None:
        check_lengths(self.lengths, lengths)
        self.lengths = list(lengths)
        for text, length in zip(self.texts, lengths, strict=True):
            del text[length:]

    def permute(self, rows: list[int]) -> None:
        pages, lengths = [list(self.pages[b]) for b in rows], [self.lengths[b] for b in rows]
        texts, salts = [list(self.texts[b]) for b in rows], [self.salts[b] for b in rows]
        holders, free = self.pool.counted(pages)  # anew: pages left idle by a Ctrl-C become free
        # At once, for a Ctrl-C in between
        self.texts, self.salts, self.pages, self.lengths, self.pool.holders, self.pool.free = (
            texts,
            salts,
            pages,
            lengths,
            holders,
            free,
        )

    def leave(self, rows: list[int]) -> None:
        for b in rows:
            self._note(b)
            self.pool.leave(self.pages[b])
        self.permute(staying(len(self.lengths), rows))

    def _run(self, parts: list[tuple[int, list[int]]], places: list[int]) -> Tensor:
        """Append blocks to rows; logits `[len(places), V]` at flat `places`, valid until the next
        run."""
        past = [self.lengths[b] for b, _ in parts]
        self._lay_out(parts, places)
        self.request.infer(share_outputs=True)
        for start, (b, tokens) in zip(past, parts, strict=True):
            self.texts[b][start:] = tokens
        return self._output("logits", len(places))

    def _lay_out(self, parts: list[tuple[int, list[int]]], places: list[int]) -> None:
        """Make room for a pass and fill its inputs."""
        self.pool.fit()
        past = [self.lengths[b] for b, _ in parts]
        for start, (b, tokens) in zip(past, parts, strict=True):
            self.lengths[b] = start + len(tokens)
        ids = [list(tokens) for _, tokens in parts]
        self.padding = self._missing(sum(map(len, ids)), past[-1] + len(ids[-1]))
        ids[-1] += [0] * self.padding
        sizes = [len(tokens) for tokens in ids]
        ends = [start + size for start, size in zip(past, sizes, strict=True)]
        pages = [
            self._room(b, start, end) for (b, _), start, end in zip(parts, past, ends, strict=True)
        ]
        same = sum(sizes) == self.bound.get("input_ids")
        repeats = max(0, self.bound.get("needed", 0) - len(places)) if same else 0
        self._put("input_ids", list(chain.from_iterable(ids)))
        self._put("position_ids", list(chain.from_iterable(map(range, past, ends))))
        self._put("needed", places + places[-1:] * repeats)
        self._put("past_lens", past)
        self._put("subsequence_begins", [0, *accumulate(sizes)])
        self._put("block_indices_begins", [0, *accumulate(map(len, pages))])
        self._put("block_indices", list(chain.from_iterable(pages)))
        self._put("max_context_len", [max(ends)])

    def _output(self, name: str, count: int) -> Tensor:
        """The first `count` rows of an output of the last run, whose padding may have made more."""
        made = torch.from_numpy(self.request.get_tensor(name).data)
        return made.flatten(0, -2)[:count]

    def _missing(self, tokens: int, end: int) -> int:
        """Tokens to add behind the last row, where the next ones will be written: a pass of the
        same size as the one before is faster, since OpenVINO prepares every layer anew for another.

        Once as many were added as another layout costs, the smaller size is the new one.
        """
        missing = self.bound.get("input_ids", 0) - tokens
        fits = self.context is None or end + missing <= self.context
        self.added = self.added + missing if missing > 0 else 0
        if self.added <= self.slack and fits:
            return max(0, missing)
        self.added = 0
        return 0

    def _room(self, b: int, start: int, end: int) -> list[int]:
        """The pages of row b's first `end` tokens; those from `start` on are its own."""
        pages = self.pages[b]
        for i in range(start // self.page, len(pages)):
            self.pool.own(pages, i)
        count = -(-end // self.page)
        while len(pages) < count:
            pages.append(self.pool.take())
        return pages[:count]

    def _put(self, name: str, values: list[int]) -> None:
        """Fill an input; its buffer is bound again only if its size has changed."""
        if name not in self.kinds:
            return  # a graph without positions
        size = len(values)
        if (name, size) not in self.buffers:
            array = np.empty(() if name == "max_context_len" else size, self.kinds[name])
            self.buffers[name, size] = array, ov.Tensor(array, shared_memory=True)
        array, tensor = self.buffers[name, size]
        array[...] = values[0] if array.ndim == 0 else values
        if self.bound.get(name) != size:
            self.bound.pop(name, None)  # broken off here, either buffer may be bound
            self.request.set_tensor(name, tensor)
            self.bound[name] = size


def page_bytes(compiled: ov.CompiledModel, names: list[str]) -> int:
    """Bytes of a page, in all layers."""
    ports = [compiled.input(name) for name in names]
    shapes = [(port.get_element_type().size, list(port.get_partial_shape())[1:]) for port in ports]
    return sum(size * prod(d.get_length() for d in shape) for size, shape in shapes)


def passes(texts: Iterable[tuple[int, list[int]]]) -> Iterator[list[tuple[int, list[int]]]]:
    """The texts of rows in passes of at most `CHUNK` tokens: several rows in one, and a long one in
    several."""
    parts: list[tuple[int, list[int]]] = []
    room = CHUNK
    for b, text in texts:
        while text:
            parts.append((b, text[:room]))
            text, room = text[room:], room - len(parts[-1][1])
            if not room:
                yield parts
                parts, room = [], CHUNK
    if parts:
        yield parts


def blank(shape: list[int], kind: ov.Type) -> tuple[NDArray[Any], ov.Tensor]:
    """Zeros, which take memory where they are written to, and a tensor over them. numpy has no
    bf16: it sees the bits as float16."""
    count = prod(shape) * kind.size
    room = np.zeros(count + LINE, np.uint8)
    first = -room.ctypes.data % LINE
    array = room[first : first + count].view(BITS[kind.size]).reshape(shape)
    return array, ov.Tensor(array, ov.Shape(shape), kind)


def ragged(flat: Tensor, need: list[int]) -> Tensor:
    """`[sum(need), n]`, row behind row -> `[B, max(need), n]`, padded with zeros."""
    if min(need) == max(need):
        return flat.view(len(need), need[0], -1)
    out = flat.new_zeros(len(need), max(need), flat.shape[1])
    for row, part in zip(out, flat.split(need), strict=True):
        row[: len(part)] = part
    return out
