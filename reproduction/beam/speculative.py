"""Speculative beam search (paper, A.4): the beams of plain beam search by fewer target passes.

Every round the draft runs a beam search of its own from the current beams, the target scores them
and all that was drafted in one pass, and plain beam search goes on for as long as its beams are
among what was scored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Unpack

import torch

from foretoken.drafters.lm import LMDrafter
from foretoken.errors import ControlError, RefusedError, format_value
from foretoken.inputs import Prompts
from foretoken.lease import hold_lease
from foretoken.models.base import Model
from foretoken.models.draft_sequences import DraftSequences
from foretoken.request import Request
from foretoken.sampling.checks import Count
from foretoken.sampling.params import Controls, SamplingParams
from foretoken.speculator import Speculator
from foretoken.text.decoding import decode_continuation
from reproduction.beam.search import BeamParams, Hypothesis, Search, continuations
from reproduction.beam.tree import Node, ScoredTree

WIDER = 4  # draft beams per beam: with fewer, one of the target's beams is soon missing
# A search draws nothing and ends by its own rules, and a user's own function may fail for any
# reason, which must not look like a beam that has no token left
REFUSED = ("temperature", "stop_strings", "stopping", "logprobs", "prompt_logprobs", "processors")


@dataclass(frozen=True, slots=True)
class BeamStats:
    """Costs of the search of one prompt, all of its beams together."""

    draft_calls: int  # passes of the draft
    depths: tuple[int, ...]  # for each target pass, the steps that lay within what was drafted
    scored: int  # texts after which the target computed logits

    @property
    def target_calls(self) -> int:
        """Passes of the target."""
        return len(self.depths)

    @property
    def steps(self) -> int:
        """Steps of plain beam search, which takes a target pass for each."""
        return sum(1 + depth for depth in self.depths)


@dataclass(frozen=True, slots=True)
class Beam:
    """A text that beam search found."""

    text: str | None  # what `tokens` add to the prompt's text; None without a tokenizer
    tokens: list[int]  # new ones, a final end-of-sequence token included
    score: float  # the sum of the tokens' log-probabilities / len(tokens) ** length_penalty
    finish_reason: Literal["stop", "length"]
    stats: BeamStats


class DraftSearch:
    """Beam searches of a draft model, each from the beams of the target's search.

    For a prompt that the model cannot read it drafts nothing.
    """

    def __init__(self, model: Model, request: Request, vocab_size: int, width: int) -> None:
        reader = DraftSequences(model)
        source = None if request.source is None else [request.source]
        _, sources = reader.join([request.prompt], source)
        self.tree = ScoredTree(model, reader.token_ids[0], sources[0] if sources else None)
        self.vocab_size, self.width = vocab_size, width
        self._deepest = reader.count_free_positions(0)  # new tokens that fit in the model's context

    def propose(self, search: Search, gamma: int) -> list[Node]:
        """Return the nodes that `width` beams reach in up to gamma steps from the search's beams.

        They begin with the target's scores and end where the search must.
        """
        drafted: list[Node] = []
        beams = search.running
        V = self.tree.model.vocab_size
        if any(node.token >= V for beam in beams for node in beam.node.upwards()):
            return drafted
        end = min(search.depth + gamma, search.request.limit - 1, self._deepest)
        while beams and beams[0].node.depth < end:
            beams = self._grown(beams, search)
            drafted += [beam.node for beam in beams]
        return drafted

    def _grown(self, beams: list[Hypothesis], search: Search) -> list[Hypothesis]:
        """Return the best continuations that do not end."""
        self.tree.score(beam.node for beam in beams)
        logits = torch.stack([self.tree.logits[beam.node] for beam in beams])
        eos = search.request.eos
        longer = continuations(
            beams, logits[:, : self.vocab_size], self.width + len(eos) * len(beams), search.controls
        )
        return [beam for beam in longer if beam.node.token not in eos][: self.width]


def beam_search(
    spec: Speculator,
    prompts: Prompts,
    params: BeamParams | None = None,
    *,
    gamma: int = 2,
    draft_beams: int | None = None,
    **controls: Unpack[Controls],
) -> list[list[Beam]]:
    """Find the most probable continuations of every prompt by beam search (paper, appendix A.4).

    Texts, scores and order are those of transformers' beam search of the same width. `gamma` and
    `draft_beams` change the number of target passes and, as passes of other shapes round
    differently, the last digits of scores.

    Args:
        spec: The target and the drafter. If the drafter is not a model with sequences of its own,
            the search is plain.
        prompts: Texts, ids or messages, without images and sounds.
        params: The width of the search and its ends; None is `BeamParams()`.
        gamma: Steps that the draft looks ahead; 0 is plain beam search.
        draft_beams: The width of the draft's search, at least num_beams; None is 4 times that.
        **controls: Fields of SamplingParams, such as `max_new_tokens` and penalties.

    Returns:
        For every prompt its beams, best first; fewer than num_return_sequences where fewer texts
        are possible.

    Raises:
        InputError: An option or a prompt is invalid.
        RefusedError: An option that a beam search cannot follow.
        ControlError: The controls leave no text.
    """
    params = params or BeamParams()
    w = params.num_beams
    gamma = Count(ge=0, remedy="0 (plain beam search) or more")("gamma", gamma)
    width = WIDER * w if draft_beams is None else draft_beams
    width = Count(ge=w, remedy=f"num_beams={w} or more")("draft_beams", width)
    requests = spec.inputs.assemble("beam_search", prompts, None, controls, 0)
    for request in requests:
        _require_searchable(spec.target, request)
    drafter = spec.drafter
    looks_ahead = gamma and isinstance(drafter, LMDrafter) and not drafter.shares
    model = drafter.model if looks_ahead else None
    found: list[list[Beam]] = []
    with hold_lease(spec.target, drafter):
        for row in spec.inputs.make_sequences(requests):
            search = Search(row.request, params, row.controls)
            draft = None
            if model is not None:
                draft = DraftSearch(model, row.request, spec.target.vocab_size, width)
            stats = _run(search, spec.target, draft, gamma)
            found.append(_beams(search, stats, spec))
    return found


def _run(search: Search, target: Model, draft: DraftSearch | None, gamma: int) -> BeamStats:
    """Run a search to its end: each round takes one pass of the target."""
    tree = ScoredTree(target, search.request.prompt, search.request.source)
    depths: list[int] = []
    while not search.done:
        tree.score(search.nodes + (draft.propose(search, gamma) if draft else []))
        depths.append(_advance(search, tree))
    return BeamStats(draft.tree.calls if draft else 0, tuple(depths), tree.scored)


def _advance(search: Search, tree: ScoredTree) -> int:
    """Go on with plain beam search while its beams are among the scored nodes; return the steps
    beyond the first."""
    steps = 0
    while not search.done and all(node in tree.logits for node in search.nodes):
        search.step(torch.stack([tree.logits[node] for node in search.nodes]))
        steps += 1
    return steps - 1


def _beams(search: Search, stats: BeamStats, spec: Speculator) -> list[Beam]:
    """Return the texts that a search found, best first."""
    if not search.finished:
        raise ControlError("the controls leave no text; ask for less")
    beams: list[Beam] = []
    for end in search.finished[: search.params.num_return_sequences]:
        tokens = end.node.new_tokens
        visible = tokens[:-1] if end.reason == "stop" else tokens
        prompt, tokenizer = search.request.prompt, spec.tokenizer
        text = decode_continuation(tokenizer, prompt, visible) if tokenizer else None
        beams.append(Beam(text, tokens, end.score, end.reason, stats))
    return beams


def _require_searchable(target: Model, request: Request) -> None:
    """Raise RefusedError for what a beam search cannot follow."""
    for name in (*REFUSED, "num_return_sequences"):
        value = getattr(request.params, name)
        if value != getattr(SamplingParams(), name):
            raise RefusedError(
                f"beam search does not take {name}={format_value(value)}; leave it out, or call "
                "generate"
            )
    if request.media is not None:
        held = ", ".join(sorted(request.media.inputs))
        raise RefusedError(f"beam search reads ids alone, and a prompt holds {held}; call generate")
    longest, context = len(request.prompt) + request.limit, target.context
    if context is not None and longest > context:
        raise RefusedError(
            f"beam search may reach {longest} tokens, and this model encodes sequences of more "
            f"than {context} differently; give a shorter prompt, or a smaller max_new_tokens"
        )
