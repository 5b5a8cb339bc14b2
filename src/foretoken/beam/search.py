"""Speculative beam search (paper, A.4): the beams of plain beam search by fewer target calls.

Every round the draft runs a beam search of its own from the current beams, the target scores them
and all that was drafted in one pass, and plain beam search goes on for as long as its beams are
among what was scored. Sees forests only: any model, decoder-only or encoder-decoder.

Plain beam search is bookkeeping: beams, what continues them, which are finished, and when to stop.
Its definitions are those of transformers, so that scores and order are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor
from torch.nn import functional

from foretoken.beam.forest import Forest, Node
from foretoken.controls.chain import chain
from foretoken.errors import DeadEndError, InputError, NumericsError, RefusedError, shown
from foretoken.models.base import Model
from foretoken.models.reader import Reader
from foretoken.request import FinishReason, Request, brief
from foretoken.sampling.checks import Number
from foretoken.sampling.draw import Shaping
from foretoken.sampling.params import COUNT
from foretoken.text.decoding import continued

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# torch leaves the type of tolist() open
# pyright: reportUnknownMemberType=false


CHECKS = {
    "num_beams": COUNT,
    "num_return_sequences": COUNT,
    # at 50, powers of a million tokens are still float64
    "length_penalty": Number(ge=-50, le=50, remedy="a number from -50 to 50"),
}


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Parameters of a search for the best texts under score / new tokens ** length_penalty.

    A text's end counts as a token. `early_stopping` True ends as soon as num_beams texts have
    ended; False as soon as the best beam could not enter them at its present length; "never" asks
    that at the longest length that is allowed, for a positive length penalty.
    """

    num_beams: int = 4
    num_return_sequences: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        for name, check in CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        if self.num_return_sequences > self.num_beams:
            raise InputError(
                f"num_return_sequences is {shown(self.num_return_sequences)}, but there are only "
                f"{shown(self.num_beams)} beams; give num_beams={shown(self.num_return_sequences)}"
            )
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise InputError(
                f"early_stopping is {self.early_stopping!r:.60}; give True, False or 'never'"
            )


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A text and its score: the sum of the log-probabilities of its new tokens."""

    node: Node
    score: float


@dataclass(frozen=True, slots=True)
class Finished:
    """A text that has ended, and its score with the length penalty."""

    node: Node
    score: float
    reason: FinishReason


def continuations(
    beams: list[Hypothesis], logits: Tensor, k: int, controls: Shaping | None = None
) -> list[Hypothesis]:
    """The k best texts that are one token longer than one of `beams`, best first.

    logits: `[len(beams), V]`. Among equal scores the earlier beam's comes first, then the lower id.
    Fewer than k where fewer are possible. Controls shape the log-probabilities, as in transformers.
    """
    past = torch.tensor([beam.score for beam in beams], dtype=torch.float64, device=logits.device)
    log_p = logits.double().log_softmax(-1)
    scores = (_shaped(log_p, beams, controls) + past[:, None]).flatten()
    edge = scores.topk(min(k, len(scores))).values[-1]
    at = ((scores >= edge) & (scores > -torch.inf)).nonzero()[:, 0]
    at = at[scores[at].argsort(descending=True, stable=True)[:k]]
    best = zip(cast(list[int], at.tolist()), cast(list[float], scores[at].tolist()), strict=True)
    V = len(scores) // len(beams)
    return [Hypothesis(beams[i // V].node.child(i % V), score) for i, score in best]


def _shaped(scores: Tensor, beams: list[Hypothesis], controls: Shaping | None) -> Tensor:
    """Each beam's scores `[V]` behind its own text; a beam whose controls leave nothing ends."""
    if controls is None:
        return scores
    scores = functional.pad(scores, (0, controls.V - scores.shape[-1]), value=-torch.inf)
    for row, beam in zip(scores, beams, strict=True):
        try:
            row.copy_(controls.shape(row, beam.node.new_tokens))
        except DeadEndError:
            row.fill_(-torch.inf)
    return scores


@dataclass(slots=True)
class Search:
    """One prompt's beam search on its way; a step looks at one token more."""

    request: Request
    params: BeamParams
    controls: Shaping | None = None
    running: list[Hypothesis] = field(init=False)  # best first
    finished: list[Finished] = field(default_factory=list[Finished], init=False)  # best first
    done: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.running = [Hypothesis(Node(self.request.prompt[-1]), 0.0)]

    @property
    def depth(self) -> int:
        """New tokens of the running beams."""
        return self.running[0].node.depth

    def step(self, logits: Tensor) -> None:
        """One step of plain beam search, from the target's logits at the running beams
        `[len(running), V]`."""
        if bool(logits.amax(-1).isfinite().logical_not().any()):
            raise NumericsError(
                f"the target's logits are invalid after {self.depth} new tokens of a beam; "
                "try dtype='float32', and look for overflow in the model"
            )
        w, eos, length = self.params.num_beams, self.request.eos, self.depth + 1
        # every beam has at most len(eos) texts that end, so w of these go on
        longer = continuations(self.running, logits, w * (1 + len(eos)), self.controls)
        last = length == self.request.limit
        open_ = [beam for beam in longer if not last and beam.node.token not in eos]
        complete = [beam for beam in longer[:w] if last or beam.node.token in eos]
        self._finish(complete, length)
        self.running = open_[:w] or self.running
        self.done = not open_ or (len(self.finished) == w and self._settled(length))

    def _finish(self, complete: list[Hypothesis], length: int) -> None:
        shrink = length**self.params.length_penalty
        for beam in complete:
            reason: FinishReason = "stop" if beam.node.token in self.request.eos else "length"
            self.finished.append(Finished(beam.node, beam.score / shrink, reason))
        self.finished.sort(key=lambda text: -text.score)
        del self.finished[self.params.num_beams :]

    def _settled(self, length: int) -> bool:
        """Tell whether the num_beams texts that have ended are the result."""
        if self.params.early_stopping is True:
            return True
        penalty = self.params.length_penalty
        if self.params.early_stopping == "never" and penalty > 0:
            length = self.request.limit
        return self.running[0].score / length**penalty <= self.finished[-1].score


@dataclass(frozen=True, slots=True)
class BeamStats:
    """Costs of the beam search of one prompt, all of its beams together.

    Attributes:
        target_calls: Target forwards, without the prefill of all but the last prompt token.
        draft_calls: Draft forwards.
        depths: For each target forward, the steps of the search that lay within what was drafted.
        steps: Steps of plain beam search that the forwards stand for: 1 + depth each.
        scored: Tokens that the target read.
        seconds: Time of the batch that the prompt was in.
        runtime: The target's backend.
        draft_runtime: The draft's backend; "none" where nothing was drafted.

    Examples:
        >>> import foretoken
        >>> spec = foretoken.load("novels")
        >>> ((best,),) = spec.beam_search("The captain", num_beams=2, max_new_tokens=4)
        >>> best.stats.steps >= best.stats.target_calls
        True
    """

    target_calls: int
    draft_calls: int
    depths: tuple[int, ...]
    steps: int
    scored: int
    seconds: float
    runtime: str
    draft_runtime: str

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dict.

        Returns:
            Values by field, which `json.dumps` takes.
        """
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Beam:
    """A text that beam search found.

    Attributes:
        text: The text that `tokens` add to the prompt's; None without a tokenizer.
        tokens: The new ids, a final end-of-sequence token included.
        score: The sum of the tokens' log-probabilities / len(tokens) ** length_penalty.
        finish_reason: "stop" or "length".
        stats: Costs of the prompt's search.

    Examples:
        >>> import foretoken
        >>> spec = foretoken.load("novels")
        >>> ((best,),) = spec.beam_search("The captain", num_beams=2, max_new_tokens=4)
        >>> len(best.tokens), best.score < 0
        (4, True)
    """

    text: str | None
    tokens: list[int]
    score: float
    finish_reason: FinishReason
    stats: BeamStats

    def __repr__(self) -> str:
        """In a line; `stats` has the rest."""
        beginning = brief(self.text, self.tokens)
        return f"Beam({beginning}, score={self.score:.4f}, finish_reason={self.finish_reason!r})"


@dataclass(slots=True)
class BeamTask:
    """A search and what it took."""

    search: Search
    depths: list[int] = field(default_factory=list[int])
    draft_calls: int = 0
    scored: int = 0
    seconds: float = 0.0


class BeamDraft:
    """Beam searches of a draft model, from beams of the target.

    For prompts that the model cannot read, as `models.reader` says, it drafts nothing.
    """

    def __init__(self, model: Model, vocab_size: int, width: int) -> None:
        self.model, self.vocab_size, self.width = model, vocab_size, width
        self.forest = _forest(model)
        self._reader = Reader(model)

    def start(self, requests: list[Request]) -> None:
        """Prompts join."""
        sources = [r.source for r in requests if r.source is not None]
        self.forest.start(*self._reader.join([r.prompt for r in requests], sources or None))

    def propose(self, tasks: list[BeamTask], gamma: int) -> list[list[Node]]:
        """For each search the nodes that `width` beams of the draft's own reach in up to gamma
        steps. They begin with the target's scores and end where the search must.
        """
        drafted: list[list[Node]] = [[] for _ in tasks]
        ends = [self._end(b, task.search, gamma) for b, task in enumerate(tasks)]
        beams = [task.search.running for task in tasks]
        while True:
            beams = [
                row if row and row[0].node.depth < end else []
                for row, end in zip(beams, ends, strict=True)
            ]
            if not any(beams):
                return drafted
            took_part = self.forest.score([[beam.node for beam in row] for row in beams])
            for b, task in enumerate(tasks):
                task.draft_calls += took_part[b]
                if beams[b]:
                    beams[b] = self._grown(b, beams[b], task.search)
                    drafted[b] += [beam.node for beam in beams[b]]

    def keep(self, nodes: list[list[Node]]) -> None:
        """These are the searches' beams now."""
        self.forest.keep(nodes)

    def leave(self, rows: list[int]) -> None:
        """These searches are done; those behind move up."""
        self.forest.leave(rows)
        self._reader.leave(rows)

    def _grown(self, b: int, beams: list[Hypothesis], search: Search) -> list[Hypothesis]:
        """The best continuations that do not end."""
        logits = self.forest.gathered(b, [beam.node for beam in beams])[:, : self.vocab_size]
        eos, most = search.request.eos, self.width + len(search.request.eos) * len(beams)
        longer = continuations(beams, logits, most, search.controls)
        return [beam for beam in longer if beam.node.token not in eos][: self.width]

    def _end(self, b: int, search: Search, gamma: int) -> int:
        """Return the depth to which this search is drafted."""
        V = self.model.vocab_size
        if V < self.vocab_size and any(
            node.token >= V for beam in search.running for node in beam.node.upwards()
        ):
            return 0
        deepest = min(search.depth + gamma, search.request.limit - 1)
        return min(deepest, search.depth + self._reader.room(b, search.depth))


def beam_search(
    requests: list[Request],
    target: Model,
    params: BeamParams,
    draft: BeamDraft | None = None,
    gamma: int = 0,
    controls: Sequence[Shaping | None] | None = None,
) -> list[BeamTask]:
    """The searches of `requests` to their ends, as plain beam search does them (paper, A.4).

    controls: of each request's texts; by itself those that its params ask for.

    Each round takes one target pass over at most num_beams + gamma * draft.width nodes for each
    prompt. Without a draft, or with gamma 0, it is plain beam search. Raises NumericsError for
    invalid logits of the target. It leaves no rows in the models.
    """
    start, trees = perf_counter(), _forest(target)
    shaping = [chain(r, target.vocab_size) for r in requests] if controls is None else controls
    tasks = [BeamTask(Search(r, params, c)) for r, c in zip(requests, shaping, strict=True)]
    active = list(tasks)
    try:
        sources = [request.source or [] for request in requests]
        trees.start([r.prompt[:-1] for r in requests], sources if target.encoder_decoder else None)
        if draft:
            draft.start(requests)
        while active:
            drafted = draft.propose(active, gamma) if draft else [[] for _ in active]
            trees.score([_nodes(task) + ahead for task, ahead in zip(active, drafted, strict=True)])
            for b, task in enumerate(active):
                _advance(task, trees, b)
                task.scored, task.seconds = trees.scored[b], perf_counter() - start
            finished = [b for b, task in enumerate(active) if task.search.done]
            active = [task for task in active if not task.search.done]
            for each in (trees, draft) if draft else (trees,):
                each.leave(finished)
                each.keep([_nodes(task) for task in active])
    finally:
        trees.clear()
        if draft:
            draft.forest.clear()
    return tasks


def _forest(model: Model) -> Forest:
    from foretoken.beam.detours import forest  # late: it imports what makes networks, for a check

    return forest(model)


def _advance(task: BeamTask, trees: Forest, b: int) -> None:
    """Plain beam search, for as long as its beams are among the nodes that were scored."""
    search, scored, depth = task.search, trees.logits[b], -1
    while not search.done and all(beam.node in scored for beam in search.running):
        search.step(trees.gathered(b, _nodes(task)))
        depth += 1
    task.depths.append(depth)


def _nodes(task: BeamTask) -> list[Node]:
    return [beam.node for beam in task.search.running]


def beams_of(
    task: BeamTask, tokenizer: PreTrainedTokenizerBase | None, runtime: str, draft_runtime: str
) -> list[Beam]:
    """Return the texts that a search found, best first. DeadEndError where there is none."""
    search = task.search
    if not search.finished:
        raise DeadEndError("the controls leave no text; ask for less")
    stats = BeamStats(
        target_calls=len(task.depths),
        draft_calls=task.draft_calls,
        depths=tuple(task.depths),
        steps=len(task.depths) + sum(task.depths),
        scored=task.scored,
        seconds=task.seconds,
        runtime=runtime,
        draft_runtime=draft_runtime,
    )
    beams: list[Beam] = []
    for end in search.finished[: search.params.num_return_sequences]:
        tokens = end.node.new_tokens
        visible = tokens[:-1] if end.reason == "stop" else tokens
        added = continued(tokenizer, search.request.prompt, visible) if tokenizer else None
        beams.append(Beam(added, tokens, end.score, end.reason, stats))
    return beams


def require_searchable(target: Model, request: Request) -> None:
    """RefusedError for a prompt with media, and for beams that may outgrow how the target has read
    their prompt."""
    if request.media is not None:
        held = ", ".join(sorted(request.media.inputs))
        raise RefusedError(
            f"a beam search reads ids alone, and a prompt holds {held}; call generate"
        )
    context, room = target.context, request.limit
    if context is not None and len(request.prompt) + room > context:
        raise RefusedError(
            f"a beam search may grow to {len(request.prompt) + room} tokens, and this model reads "
            f"texts of more than {context} in another way; give fewer, or max_new_tokens"
        )
