"""An n-gram table as the approximation model (section 3.6): c is nearly 0.

    foretoken generate --target TARGET --draft reproduction.ngram:FILE

`NGram` is an interpolated back-off table of any order, one file; `NGramDrafter` guesses with it.
`train_ngram` fits the weights: here a distribution is, from short contexts c to long ones,
q_k(x | c) = weight_k(c, x) + backoff_k(c) * q_{k-1}(x | c less its first).
"""
# torch, NumPy, transformers and JSON leave types open
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor

from foretoken.drafters.base import Draft, Drafter, Draw, pack
from foretoken.errors import InputError
from foretoken.loading.target import LoadedTarget
from foretoken.models.row_slots import list_remaining_rows
from foretoken.sampling.distributions import SamplingParams, compute_cdf, probabilities
from foretoken.storage import files
from foretoken.transfer import to_list

FORMAT, VERSION = "foretoken.ngram", 1
MEMO_BYTES = 2**26  # of distributions and their running sums that are kept
MEMO_BEST = 2**16  # likeliest tokens that are kept


@dataclass(frozen=True, slots=True)
class Level:
    """The k-grams of one order, sorted: a k-gram's place is its number as a context of the next.

    Context c, itself a (k-1)-gram of the level before, is followed by
    `tokens[starts[c] : starts[c + 1]]`.
    """

    starts: np.ndarray  # uint32 [contexts + 1]
    tokens: np.ndarray  # uint32 [k-grams], ascending within a context
    weights: np.ndarray  # float32 [k-grams]
    backoff: np.ndarray  # float32 [contexts], 1 where a context was never followed by anything


class NGram:
    """An interpolated back-off table of order N over V tokens, one file.

    `python -m reproduction train ngram` fits one. From short contexts c to long ones, its
    distribution is
    q_k(x | c) = weight_k(c, x) + backoff_k(c) * q_{k-1}(x | c less its first token).

    Args:
        unigram: q of a token without a context, `[V]`, float32.
        levels: The k-grams of each order k from 2 to N.
        fingerprint: A digest of the tokenizer's vocabulary; None where it is unknown.

    Examples:
        >>> import numpy
        >>> table = NGram(numpy.array([0.25, 0.75], dtype=numpy.float32), levels=[])
        >>> table.order, table.vocab_size
        (1, 2)
    """

    def __init__(
        self, unigram: np.ndarray, levels: list[Level], fingerprint: str | None = None
    ) -> None:
        self.unigram, self.levels, self.fingerprint = unigram, levels, fingerprint

    @property
    def order(self) -> int:
        """N: tokens of the longest k-gram."""
        return 1 + len(self.levels)

    @property
    def vocab_size(self) -> int:
        """V: the size of the vocabulary."""
        return len(self.unigram)

    def distribution(self, context: Sequence[int]) -> np.ndarray:
        """Return the distribution after a context.

        Args:
            context: Ids, of which the last N - 1 count.

        Returns:
            q, `[V]`, float32, sum 1.
        """
        q = self.unigram.copy()
        for k, level in enumerate(self.levels[: len(context)], 1):
            row = self._find(context[len(context) - k :])
            if row is None:
                break  # nor can anything longer occur
            here = slice(int(level.starts[row]), int(level.starts[row + 1]))
            q *= level.backoff[row]
            q[level.tokens[here]] += level.weights[here]
        return q

    def _find(self, gram: Sequence[int]) -> int | None:
        """The number of a k-gram, searched token by token; None where it never occurred."""
        node = gram[0]
        if node >= len(self.levels[0].backoff):  # an id that the table's own vocabulary lacks
            return None
        for level, token in zip(self.levels, gram[1:], strict=False):
            end = int(level.starts[node + 1])
            node = bisect_left(level.tokens, token, int(level.starts[node]), end)
            if node == end or level.tokens[node] != token:
                return None
        return node

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, whole or not at all.

        Args:
            path: The file.

        Raises:
            OSError: The file cannot be written.
        """
        path = Path(path)
        tensors = {"unigram": self.unigram}
        for k, level in enumerate(self.levels, 2):
            tensors |= {f"{k}.{name}": getattr(level, name) for name in Level.__slots__}
        facts = {"version": VERSION, "order": self.order, "vocab_size": self.vocab_size}
        header = {FORMAT: json.dumps(facts | {"fingerprint": self.fingerprint})}
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomically(
            path, save(tensors, header)
        )  # save_file's would be for its owner alone

    @classmethod
    def load(
        cls, path: str | Path, *, vocab_size: int | None = None, fingerprint: str | None = None
    ) -> NGram:
        """Read a file that `save` wrote.

        Args:
            path: The file.
            vocab_size: V of the target; None takes the table as it is. A narrower table is widened
                by tokens of no probability if the fingerprints agree: V then differs by padding
                only.
            fingerprint: A digest of the target's vocabulary; None where it is unknown.

        Returns:
            The table.

        Raises:
            InputError: The file cannot be read, or belongs to another tokenizer or vocabulary.
        """
        path = Path(path)
        table = _checked_table(path)
        if fingerprint and table.fingerprint and fingerprint != table.fingerprint:
            raise InputError(f"{path} was fitted with another tokenizer; fit one with the target's")
        V = table.vocab_size if vocab_size is None else vocab_size
        padded = V > table.vocab_size and fingerprint and fingerprint == table.fingerprint
        if V != table.vocab_size and not padded:
            raise InputError(
                f"{path} is for {table.vocab_size} tokens, the target has {V}; "
                "fit one with the target's tokenizer"
            )
        table.unigram = np.pad(table.unigram, (0, V - table.vocab_size))
        return table


class NGramDrafter(Drafter):
    """An n-gram table as the drafter (paper, section 3.6): c is nearly 0.

    Its distributions are shaped by the request's sampling params, as the target's are.

    Args:
        table: The table.

    Examples:
        >>> import foretoken, numpy
        >>> spec = foretoken.load("novels", draft="none")
        >>> V = spec.target.vocab_size
        >>> table = NGram(numpy.full(V, 1 / V, dtype=numpy.float32), levels=[])
        >>> spec = foretoken.load("novels", draft=NGramDrafter(table))
        >>> (out,) = spec.generate("The captain looked", max_new_tokens=8, gamma=2)
        >>> out.text
        ' at the doctor, and the doctor said'
    """

    def __init__(self, table: NGram) -> None:
        self.table, self.vocab_size = table, table.vocab_size
        self.texts: list[list[int]] = []
        rows = max(16, MEMO_BYTES // (12 * table.vocab_size))
        self.distribution = lru_cache(rows)(self._distribution)
        self.best = lru_cache(MEMO_BEST)(self._best)

    def start(
        self, rows: list[int], prompts: list[list[int]], sources: list[list[int]] | None
    ) -> None:
        self.texts += [list(prompt) for prompt in prompts]

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        n = self.table.order - 1
        tails = [deque(text[max(0, len(text) - n) :], maxlen=n) for text in self.texts]
        if draw.controlled:
            return self._shaped(tails, gamma, draw)
        if draw.greedy:
            return pack([self._likeliest(t, g) for t, g in zip(tails, gamma, strict=True)])
        return self._drawn(tails, gamma, draw)

    def commit(self, tokens: list[list[int]]) -> None:
        for text, kept in zip(self.texts, tokens, strict=True):
            text.extend(kept)

    def rewind(self, counts: list[int]) -> None:
        for text, count in zip(self.texts, counts, strict=True):
            del text[len(text) - count :]

    def leave(self, rows: list[int]) -> None:
        self.texts = [self.texts[b] for b in list_remaining_rows(len(self.texts), rows)]

    def _likeliest(self, tail: deque[int], gamma: int) -> list[int]:
        draft_tokens: list[int] = []
        for _ in range(gamma):
            draft_tokens.append(self.best(tuple(tail)))
            tail.append(draft_tokens[-1])
        return draft_tokens

    def _drawn(self, tails: list[deque[int]], gamma: list[int], draw: Draw) -> Draft:
        """Rows that want fewer draft tokens than others are drawn along: their surplus is
        padding."""
        B, G = len(gamma), max(gamma, default=0)
        q = torch.empty(B, G, self.table.vocab_size)
        draft_tokens: list[list[int]] = [[] for _ in gamma]
        for i in range(G):
            contexts = zip(tails, draw.params, strict=True)
            rows = [self.distribution(tuple(tail), params) for tail, params in contexts]
            for b, (row, _) in enumerate(rows):
                q[b, i] = row
            cdf = rows[0][1] if B == 1 else torch.cat([sums for _, sums in rows])
            for b, token in enumerate(to_list(draw(q[:, i], i, cdf))):
                draft_tokens[b].append(token)
                tails[b].append(token)
        return pack([ids[:g] for ids, g in zip(draft_tokens, gamma, strict=True)], q)

    def _shaped(self, tails: list[deque[int]], gamma: list[int], draw: Draw) -> Draft:
        """Rows with controls have distributions of their own at every place."""
        ids: list[list[int]] = []
        distributions: list[Tensor] = []
        for i in range(max(gamma, default=0)):
            rows = [torch.from_numpy(self.table.distribution(tuple(tail))) for tail in tails]
            draft_token, q = draw.sample(torch.stack(rows).log(), i)
            ids.append(to_list(draft_token))
            distributions += [] if q is None else [q]
            for tail, token in zip(tails, ids[-1], strict=True):
                tail.append(token)
        draft_tokens = [[row[b] for row in ids[:g]] for b, g in enumerate(gamma)]
        G = max(map(len, draft_tokens), default=0)
        return pack(draft_tokens, torch.stack(distributions[:G], 1) if distributions else None)

    def _distribution(
        self, context: tuple[int, ...], params: SamplingParams
    ) -> tuple[Tensor, Tensor]:
        """q and its running sum, `[1, V]` each: memoised, they make most of a guess's cost."""
        q = probabilities(torch.from_numpy(self.table.distribution(context)).log()[None], params)
        return q, compute_cdf(q)

    def _best(self, context: tuple[int, ...]) -> int:
        return int(self.table.distribution(context).argmax())  # numpy's is the lowest index on ties


def drafter(argument: str, target: LoadedTarget) -> NGramDrafter:
    """Return the drafter of the table in a file, for a target.

    Args:
        argument: The file.
        target: The target, whose tokenizer and vocabulary size the table must have.

    Returns:
        The drafter.

    Raises:
        InputError: The file cannot be read, or belongs to another tokenizer or vocabulary.
    """
    if not argument:
        raise InputError("no file is given; give --draft reproduction.ngram:FILE")
    mark = fingerprint(target.tokenizer.get_vocab()) if target.tokenizer else None
    return NGramDrafter(NGram.load(argument, vocab_size=target.vocab_size, fingerprint=mark))


def fingerprint(vocabulary: dict[str, int]) -> str:
    """Equal for two tokenizers whose `get_vocab()` is equal, else different."""
    document = json.dumps(sorted((token, i) for token, i in vocabulary.items()))
    return hashlib.sha256(document.encode()).hexdigest()


def _checked_table(path: Path) -> NGram:
    if not path.is_file():
        raise InputError(
            f"there is no n-gram file {path}; make one with `python -m reproduction train ngram`"
        )
    try:
        with safe_open(path, framework="np") as file:
            facts = files.parse_json((file.metadata() or {}).get(FORMAT, "{}"))
            if not isinstance(facts, dict) or facts.get("version") != VERSION:
                raise InputError(f"{path} is not an n-gram file of version {VERSION}; fit it again")
            levels = [
                Level(*(file.get_tensor(f"{k}.{name}") for name in Level.__slots__))
                for k in range(2, facts["order"] + 1)
            ]
            table = NGram(file.get_tensor("unigram"), levels, facts["fingerprint"])
            sizes = facts["order"], facts["vocab_size"]
            fingerprinted = facts["fingerprint"] is None or isinstance(facts["fingerprint"], str)
            complete = sum(1 for _ in file.keys()) == 1 + len(levels) * len(tuple(Level.__slots__))
            sound = (
                fingerprinted
                and complete
                and sizes == (table.order, table.vocab_size)
                and _sound(table)
            )
    except (SafetensorError, OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} cannot be read ({error}); fit it again") from error
    if not sound:
        raise InputError(f"{path} holds a broken n-gram table; fit it again")
    return table


def _sound(table: NGram) -> bool:
    """Tell whether these are the arrays that `save` writes, all indices are in range and all
    weights in [0, 1]."""
    kinds = [(table.unigram, np.float32)]
    for level in table.levels:
        kinds += [(level.starts, np.uint32), (level.tokens, np.uint32)]
        kinds += [(level.weights, np.float32), (level.backoff, np.float32)]
    if not all(array.ndim == 1 and array.dtype == kind for array, kind in kinds):
        return False
    if not table.vocab_size:
        return False
    contexts, weights = table.vocab_size, [table.unigram]
    for level in table.levels:
        starts, tokens = level.starts, level.tokens
        fits = len(starts) == contexts + 1 and len(level.backoff) == contexts
        fits = fits and starts[0] == 0 and starts[-1] == len(tokens) == len(level.weights)
        if not fits or (starts[1:] < starts[:-1]).any() or (tokens >= table.vocab_size).any():
            return False
        contexts, weights = len(tokens), [*weights, level.weights, level.backoff]
    return all(((0 <= w) & (w <= 1)).all() for w in weights)
