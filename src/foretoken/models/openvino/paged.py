"""A decoder on OpenVINO's paged attention, behind the Model protocol.

Keys and values live in pages of 32 tokens (OpenVINO calls them blocks); a row is a list of pages
and a length. One flat pass takes the new tokens of all rows, whatever their lengths; rollback is a
smaller length, and copied rows share pages until one of them writes. It does not know where its
graph came from.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as ops
from openvino._offline_transformations import paged_attention_transformation
from torch import Tensor

from foretoken.models.base import Blocks, Continuation
from foretoken.models.companion import Companion, require_alike
from foretoken.models.openvino.pages import MOST, Flat, FlatInputs, Pool, Prefixes, layers, ragged
from foretoken.models.openvino.states import NONE, RowStates, StateFeed
from foretoken.models.prefixes import PrefixCache
from foretoken.models.rows import BEYOND, CHUNK, check_lengths, check_room, roomy, staying
from foretoken.models.shown import Known, Shown
from foretoken.models.states import PASS, REWIND, in_parts

KEY_CACHE, WINDOW = 3, 10  # inputs of the PagedAttentionExtension operator
CACHED_BYTES = 2**28  # of states behind beginnings of texts that have left, at most


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


class PagedModel:
    """Model protocol over `compiled`, which `paged` made; `facts` are the export's."""

    encoder_decoder = False
    source_context: int | None = None
    source_vocab_size: int | None = None
    runtime = "openvino"
    takes_tensors = False
    device = torch.device("cpu")

    def __init__(
        self,
        compiled: ov.CompiledModel,
        facts: dict[str, Any],
        join: ov.CompiledModel | None = None,
    ) -> None:
        self.vocab_size: int = facts["vocab_size"]
        self.context: int | None = facts["context"]
        self.longest: int | None = facts.get("longest") or self.context
        self.identity: str | None = facts.get("identity")  # what its speed follows from
        self.computed: str = facts.get("computed", "float32")
        self.flat = Flat(compiled, facts)
        self.pool = Pool(layers(compiled))
        self.pool.bind(self.flat.request, {name: name for name in self.pool.layers})
        self.sizes = sizes = facts.get("states")  # of states; None: there are none
        self.states = RowStates(sizes or NONE)
        self.rewind = REWIND if sizes else None
        self.widest = PASS if sizes else 2 * CHUNK  # tokens of a row in a pass
        self.flat.states = StateFeed(self.flat.request, self.states) if sizes else None
        self.kept: PrefixCache | None = None  # states behind beginnings of texts
        self.lengths: list[int] = []
        self.pages: list[list[int]] = []  # of every row
        self.texts: list[list[int]] = []  # whose keys and values are there
        self.salts: list[Hashable] = []
        self.salt = ""  # of the rows that join next
        self.long: list[bool] = []
        self._beyond = False  # of the rows that join next
        self.recalled: list[int] = []  # tokens of the rows that joined last
        self.taps = tuple(facts.get("taps", ()))
        self._seen = Shown()  # states there, until they are taken
        # how many of a text's first tokens need not show theirs; None: nobody reads them
        self._watched: Callable[[list[int]], int] | None = None
        self._asked: list[list[int]] = []  # texts whose beginnings are about to join
        self._join = join and join.create_infer_request()  # of a decoder of pairs
        self._given: Tensor | None = None  # what it reads in the next pass
        self.need: list[int] = []  # positions of every row in the last score
        self._hidden: Tensor | None = None  # of the last score, where it took several passes

    @property
    def hidden(self) -> Tensor:
        if self._hidden is not None:
            return self._hidden
        return ragged(self.flat.output("hidden", sum(self.need)), self.need)

    @property
    def padding(self) -> int:
        return self.flat.padding

    def price(self, seconds: Callable[[int], float] | None, change: float, *, single: bool) -> None:
        self.flat.sizes.price(seconds, change, single=single)

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of a token, scales included."""
        return self.pool.page_bytes // self.pool.page

    @property
    def kind(self) -> str:
        """The element type of keys and values."""
        return self.pool.layers["key_cache.0"].kind.get_type_name()

    def companion(
        self, compiled: ov.CompiledModel, facts: dict[str, Any], some: tuple[int, ...]
    ) -> PagedCompanion:
        """A copy of this model, which has `some` of its layers, or all of them where that is empty,
        over its rows."""
        flat, draft_layers = Flat(compiled, facts), layers(compiled)
        numbers = some or range(len(self.pool.layers) // 2)
        names = {
            f"{part}_cache.{layer}": f"{part}_cache.{i}"
            for part in ("key", "value")
            for i, layer in enumerate(numbers)
        }
        require_alike(
            draft_layers, {name: self.pool.layers[number] for number, name in names.items()}
        )
        if self.rewind is not None:
            require_alike(facts["states"], self.sizes)
            flat.states = StateFeed(flat.request, self.states)
        self.pool.bind(flat.request, names)
        return PagedCompanion(self, flat, facts)

    def show(self, known: Callable[[list[int]], int] | None) -> None:
        self._watched = known if self.taps else None

    def shown(self) -> list[Known | None]:
        return self._seen.take()

    def joined(self, states: Tensor) -> Tensor:
        """States of a target, `[N, W]`, as a decoder of pairs reads them, `[N, H]`."""
        if self._join is None:
            return states
        self._join.infer([states.contiguous().numpy()])
        return torch.from_numpy(self._join.get_output_tensor(0).data.copy())

    def give(self, pairs: Tensor, counts: list[int]) -> None:
        """The next pass reads these in place of ids, row behind row: `[sum(counts), W]`."""
        self._given = pairs

    def memory(self, lengths: list[int], sources: list[int]) -> int:
        # the row that comes last in a pass takes its padding
        pages = sum(-(-(length + MOST) // self.pool.page) for length in lengths)
        states = self.states.row_bytes * roomy(len(lengths))
        return pages * self.pool.page_bytes + states

    def reserve(self, total: int) -> None:
        self.pool.reserve(total // self.pool.page_bytes)

    def remember(self, on: bool) -> None:
        self.pool.prefixes = Prefixes() if on else None
        self.kept = PrefixCache(CACHED_BYTES, divisible=False) if on and self.sizes else None

    def salted(self, salt: str) -> None:
        self.salt = salt

    def beyond(self, on: bool) -> None:
        self._beyond = on

    def known(self, prompt: list[int]) -> int:
        if self._watched is not None:  # the beginning that joins ends before what tells its pages
            self._asked.append(list(prompt))
        length = self._showing(prompt, self._pages_found(prompt, self._shared_by))
        return length if self.kept is None else self.kept.find(self._shared_by, prompt[:length])[0]

    def _showing(self, prompt: list[int], pages: list[int]) -> int:
        """Count the tokens in these pages that a row may share: not those whose states are read."""
        length, page = len(pages) * self.pool.page, self.pool.page
        return (
            length if self._watched is None else min(length, self._watched(prompt)) // page * page
        )

    @property
    def _shared_by(self) -> Hashable:
        """Return the key of rows that share pages: their salt, and the way they are read in."""
        return (self.salt, "long") if self._beyond else self.salt

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        limit = self.longest if self._beyond else self.context
        check_room([0] * len(prompts), [len(p) for p in prompts], limit)
        if not self.lengths:
            self.flat.sizes.forget()
        first, rows = len(self.lengths), range(len(prompts))
        entered = self.states.entered(len(prompts))
        self.states.places, self.states.based, self.states.forks = entered
        # at once, for a Ctrl-C in between
        self.texts, self.salts, self.long, self.pages, self.lengths = (
            [*self.texts, *([] for _ in rows)],
            [*self.salts, *(self._shared_by for _ in rows)],
            [*self.long, *(self._beyond for _ in rows)],
            [*self.pages, *([] for _ in rows)],
            [*self.lengths, *(0 for _ in rows)],
        )
        self._seen.join(Shown(len(prompts)))
        cached: dict[int, int] = {}
        for part in self._apart(dict(enumerate(prompts, first))):
            cached |= {b: self._recall(b, prompt) for b, prompt in part}
            for blocks in passes([(b, prompt[cached[b] :]) for b, prompt in part], self.widest):
                read = dict(blocks)
                every = range(len(self.lengths))
                self.score([read.get(b, []) for b in every], [0 for _ in every])
            for b, _ in part:
                self._note(b)
        self.recalled = [cached[b] for b in sorted(cached)]
        self._asked = []

    def _apart(self, prompts: dict[int, list[int]]) -> Iterator[list[tuple[int, list[int]]]]:
        """Prompts of rows to read together; first those that the others may share pages of."""
        page = self.pool.page
        begins = {b: tuple(prompt[:page]) for b, prompt in prompts.items()}
        firsts = {begin: b for b, begin in reversed(begins.items()) if len(begin) == page}
        shares = self.pool.prefixes is not None
        later = {b for b, begin in begins.items() if shares and firsts.get(begin, b) != b}
        yield [(b, prompt) for b, prompt in prompts.items() if b not in later]
        yield [(b, prompts[b]) for b in sorted(later)]

    def _recall(self, b: int, prompt: list[int]) -> int:
        """Let a fresh row share the pages of texts that began alike; the tokens in them."""
        pages = self._pages_found(prompt, self.salts[b])
        whole = (text for text in self._asked if text[: len(prompt)] == prompt)
        length = self._showing(next(whole, prompt), pages)
        pages = pages[: length // self.pool.page]
        if self.kept is not None:
            self.states.forks[b] = length
            length, states = self.kept.find(self.salts[b], prompt[:length])
            if length:
                self.states.put(b, length, states)
            pages = pages[: length // self.pool.page]
        self.pool.share(pages)
        self.pages[b], self.texts[b], self.lengths[b] = pages, prompt[:length], length
        return length

    def _pages_found(self, prompt: list[int], salt: Hashable) -> list[int]:
        prefixes = self.pool.prefixes
        return [] if prefixes is None else prefixes.find(prompt, self.pool.page, salt)

    def _note(self, b: int) -> None:
        """Others may share a row's whole pages from now on."""
        if self.pool.prefixes is not None:
            text = self.texts[b][: self.lengths[b]]
            self.pool.prefixes.note(text, self.pages[b], self.pool.page, self.salts[b])
            self._keep_states(b, len(text) // self.pool.page * self.pool.page)

    def _keep_states(self, b: int, length: int) -> None:
        """Keep row b's states behind so many tokens for others, where they are kept at all."""
        if self.kept is None or not length:
            return
        text, salt = self.texts[b][:length], self.salts[b]
        if self.kept.find(salt, text)[0] < length:
            states = self.states.at(b, length, self.lengths[b])
            if states is not None:
                self.kept.add(salt, text, states)

    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        assert isinstance(blocks, list)
        past, counts = self.lengths, [len(block) for block in blocks]
        limits = [self.longest if long else self.context for long in self.long]
        check_room(past, counts, limits)
        if self.sizes and max(counts, default=0) > self.widest:
            return self._score_in_parts(blocks, need)
        self._hidden = None
        self.lengths = [n + count for n, count in zip(past, counts, strict=True)]
        logits = self.scored(self.flat, past, blocks, need)
        if self._watched is not None and any(counts):
            states = self.flat.output("shown", sum(counts)).clone()
            self._seen.add(past, list(states.split(counts)))
        for text, start, block in zip(self.texts, past, blocks, strict=True):
            text[start:] = block
        for b, fork in enumerate(self.states.forks):
            if past[b] < fork <= self.lengths[b]:
                self._keep_states(b, fork)
        self.need = need[:]
        return logits

    def _score_in_parts(self, blocks: list[list[int]], need: list[int]) -> Tensor:
        def run(parts: list[list[int]], some: list[int]) -> tuple[Tensor, Tensor]:
            return self.score(parts, some).clone(), self.hidden.clone() if any(some) else logits

        logits = torch.zeros(len(blocks), 0, self.vocab_size)
        made = in_parts(run, blocks, need)
        if made is not None:
            logits, self._hidden = made
        return logits

    def scored(
        self, flat: Flat, past: list[int], blocks: list[list[int]], need: list[int]
    ) -> Tensor:
        """The logits as `score` returns them, by any graph over these pages, of which row b has
        past[b] tokens in place; no row moves on."""
        rows = [b for b, block in enumerate(blocks) if block]
        if not rows:
            return torch.zeros(len(blocks), 0, self.vocab_size)
        end, tokens = rows[-1], sum(map(len, blocks))
        room, length = self.widest - len(blocks[end]), past[end] + len(blocks[end])
        flat.pad(tokens, length, room, single=tokens == len(rows))
        return self._pass(flat, past, blocks, rows, need)

    def _pass(
        self, flat: Flat, past: list[int], blocks: list[list[int]], rows: list[int], need: list[int]
    ) -> Tensor:
        """A pass over the blocks of these rows and the padding behind them."""
        self.pool.fit()
        ids = [blocks[b] for b in rows]
        if flat.padding:
            ids[-1] = ids[-1] + [0] * flat.padding
        feed = FlatInputs()
        for b, tokens in zip(rows, ids, strict=True):
            start, end = past[b], len(blocks[b])
            pages = self._room(b, start, start + len(tokens))
            feed.add(tokens, start, pages, BEYOND * self.long[b], range(end - need[b], end))
        if self._given is not None:
            flat.give(self._given.numpy(), len(feed.ids))
        if flat.states is None:
            return flat.run(feed, need)
        laid = self.states.lay_out(rows, past, ids)
        flat.states.put(laid)
        logits = flat.run(feed, need)
        flat.states.keep(laid)
        return logits

    def go_on(self, blocks: list[list[int]], counts: list[int], V: int | None) -> Continuation:
        logits = self.score(blocks, [int(count > 0) for count in counts])
        made = self.gone_on(self.flat, self.lengths, logits, counts, V)
        for text, ids in zip(self.texts, made.ids, strict=True):
            text += ids[:-1]
        self.lengths = list(map(len, self.texts))
        return made

    def gone_on(
        self, flat: Flat, past: list[int], logits: Tensor, counts: list[int], V: int | None
    ) -> Continuation:
        """The tokens as `go_on` returns them, by any graph over these pages, from its last `logits
        [B, 1, V]` on; no row moves on."""
        past, made = list(past), Continuation([[] for _ in counts], [[] for _ in counts])
        rows, scores = [b for b, count in enumerate(counts) if count], logits.numpy()[:, 0]
        scores = scores if len(rows) == len(counts) else scores[rows]
        while rows:
            for b, row in zip(rows, scores, strict=True):
                x = int(row[:V].argmax())
                made.ids[b].append(x)
                made.tops[b].append(float(row[x]))
            rows = [b for b in rows if counts[b] > len(made.ids[b])]
            if rows:
                self._follow(flat, past, made.ids, rows)
                scores = flat.last(len(rows))
        return made

    def _follow(self, flat: Flat, past: list[int], ids: list[list[int]], rows: list[int]) -> None:
        """A pass over the last ids of these rows, behind past[b] tokens each."""
        end = past[rows[-1]]
        flat.pad(len(rows), end + 1, self.widest - 1, single=True)
        page = self.pool.page
        inside = (end + flat.padding) % page and all(past[b] % page for b in rows)
        if inside and flat.repeats(len(rows)):  # the pages are those of the last pass
            flat.again([ids[b][-1] for b in rows])
        else:
            blocks, need = [[] for _ in ids], [0] * len(ids)
            for b in rows:
                blocks[b], need[b] = ids[b][-1:], 1
            self._pass(flat, past, blocks, rows, need)
        for b in rows:
            past[b] += 1

    def set_lengths(self, lengths: list[int]) -> None:
        check_lengths(self.lengths, lengths)
        self.states.check_back(self.lengths, lengths)
        self.lengths = list(lengths)
        self._seen.cut(lengths)
        for text, length in zip(self.texts, lengths, strict=True):
            del text[length:]

    def permute(self, rows: list[int]) -> None:
        pages, lengths = [list(self.pages[b]) for b in rows], [self.lengths[b] for b in rows]
        texts, salts = [list(self.texts[b]) for b in rows], [self.salts[b] for b in rows]
        long = [self.long[b] for b in rows]
        moved, pool = self.states.selected(rows, self.lengths), self.pool
        holders, free = pool.counted(pages)  # anew: pages left idle by a Ctrl-C become free
        # at once, for a Ctrl-C in between
        self.texts, self.salts, self.long, self.pages, self.lengths, pool.holders, pool.free = (
            texts,
            salts,
            long,
            pages,
            lengths,
            holders,
            free,
        )
        self._seen.select(rows)
        states = self.states
        states.places, states.based, states.forks, states.sound = moved

    def leave(self, rows: list[int]) -> None:
        for b in rows:
            if b < len(self.pages):  # of rows that were about to join, some may not have
                self._note(b)
                self.pool.leave(self.pages[b])
        self.permute(staying(len(self.lengths), rows))

    def _room(self, b: int, start: int, end: int) -> list[int]:
        """The pages of row b's first `end` tokens; those from `start` on are its own."""
        pages = self.pages[b]
        for i in range(start // self.pool.page, len(pages)):
            self.pool.own(pages, i)
        count = -(-end // self.pool.page)
        while len(pages) < count:
            pages.append(self.pool.take())
        return pages[:count]


class PagedCompanion(Companion[Flat]):
    """A copy over the rows of a PagedModel."""

    target: PagedModel

    def go_on(self, blocks: list[list[int]], counts: list[int], V: int | None) -> Continuation:
        logits = self.score(blocks, [int(count > 0) for count in counts])
        made = self.target.gone_on(self.graph, self._own, logits, counts, V)
        self._own = [n + len(ids[:-1]) for n, ids in zip(self._own, made.ids, strict=True)]
        return made


def passes(
    texts: Iterable[tuple[int, list[int]]], widest: int = CHUNK
) -> Iterator[list[tuple[int, list[int]]]]:
    """The texts of rows in passes of at most `CHUNK` tokens, `widest` of one row: several rows in
    one, and a long one in several."""
    rest = [(b, text) for b, text in texts if text]
    while rest:
        parts: list[tuple[int, list[int]]] = []
        room = CHUNK
        for b, text in rest:
            if room:
                parts.append((b, text[: min(room, widest)]))
                room -= len(parts[-1][1])
        yield parts
        read = {b: len(part) for b, part in parts}
        rest = [(b, text[read.get(b, 0) :]) for b, text in rest]
        rest = [(b, text) for b, text in rest if text]
