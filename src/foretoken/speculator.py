"""The face of the package: text or ids in, completions out. `foretoken.load` makes a
`Speculator`."""

from __future__ import annotations

import logging
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

from foretoken import costs, text
from foretoken.beam.hypotheses import BeamParams
from foretoken.beam.search import Beam, BeamDraft, Task, beam_search, beam_stats
from foretoken.claim import claimed
from foretoken.costs import Costs
from foretoken.drafters.base import Drafter
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.ends import Ends
from foretoken.engine import Engine, threads
from foretoken.errors import InputError, shown
from foretoken.gamma import Adaptive, Fixed, Gamma
from foretoken.models.base import Model
from foretoken.options import Prompt, Prompts, Seed, as_list, check, check_beams, keys_of
from foretoken.probe import TOKENS, Probed, probe, probe_shared
from foretoken.request import Completion, Piece, Request, Row, stats
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.judge import Judge
from foretoken.sampling.keys import RowKey
from foretoken.sampling.verify import Rule

BATCH = 16  # rows that share a pass; a row's text does not depend on it
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)
PROBE_PROMPT = "It was the first day of the"
PROBE_KEY = RowKey(2**63, 0)  # seeds end below it: gamma's prior has not seen any row's numbers


@dataclass(slots=True)
class Speculator:
    """A target, a drafter and, where there is one, a tokenizer. `suggested`: options of `generate`
    that the model's own generation config names."""

    target: Model = field(repr=False)
    drafter: Drafter = field(repr=False)
    tokenizer: PreTrainedTokenizerBase | None = field(default=None, repr=False)
    ends: Ends = field(default=Ends(), repr=False)
    target_name: str = "target"
    draft_name: str = "draft"
    suggested: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)
    _costs: dict[tuple[str, int], Costs] = field(default_factory=dict, init=False, repr=False)
    _engine: Engine = field(init=False, repr=False)
    _told: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        self._engine = Engine(self.target, self.drafter)

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("target", "drafter") and hasattr(self, "_engine"):
            raise InputError(
                f"the {name} of a Speculator stays; make another Speculator with "
                f"dataclasses.replace(spec, {name}=...)"
            )
        object.__setattr__(self, name, value)

    def generate(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        gamma: int | None = None,
        seed: Seed = 0,
        rule: str | Rule = "block",
        lenience: float = 1.0,
    ) -> list[Completion]:
        """Continue every prompt in the target's own law; one completion per prompt, in order.

        A str or a list of ids is one prompt. gamma: guesses per target call, 0 for plain decoding,
        None to choose before every step, from costs measured once and the row's own past. seed: an
        int (row i is keyed (seed, i)), or one int or pair per prompt. rule: with "coupled" a seed
        gives one text, whatever drafter and gamma; at temperature 0 every rule keeps the guesses
        that equal the argmax, so a function of one's own is not called there. lenience: below 1
        guesses pass more easily, up to 1 / lenience times the target's probability (appendix A.5),
        and the output is no longer in the target's law: by how much, `stats.bias` says. At
        temperature 0 those pass that have at least `lenience` times the probability of the
        likeliest. A KeyboardInterrupt ends it early: unfinished rows come back with finish_reason
        "interrupted".
        Ids may also be tensors or arrays, [n] for one prompt and [B, n] for B of them, or what a
        tokenizer returns, whose padding is dropped.
        """
        params = SamplingParams(temperature, top_k, top_p, min_p)
        judge = check(params, max_new_tokens, gamma, rule, lenience)
        requests = self.requests(as_list(prompts), max_new_tokens, seed)
        if not requests:
            return []
        self._tell_suggested(params)
        policy = self._gamma(params, gamma, len(requests))
        rows = [Row.of(request) for request in requests]
        try:
            for i in range(0, len(rows), BATCH):
                for _ in self._engine.run(rows[i : i + BATCH], params, judge, policy):
                    pass
        except KeyboardInterrupt:  # unfinished rows are returned, marked "interrupted"
            pass
        return [self._completion(row) for row in rows]

    def stream(
        self,
        prompt: Prompts,
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        gamma: int | None = None,
        seed: Seed = 0,
        rule: str | Rule = "block",
        lenience: float = 1.0,
    ) -> Generator[Piece, None, Completion]:
        """The same for one prompt, a piece after every step; the generator's return value is the
        completion.

        The pieces' texts and tokens concatenate to exactly what `generate` returns.
        """
        params = SamplingParams(temperature, top_k, top_p, min_p)
        judge = check(params, max_new_tokens, gamma, rule, lenience)
        prompts = as_list(prompt)
        if len(prompts) != 1:
            remedy = "call generate for several" if prompts else "give a text or ids"
            raise InputError(f"stream takes one prompt, not {len(prompts)}; {remedy}")
        requests = self.requests(prompts, max_new_tokens, seed)
        self._tell_suggested(params)
        policy = self._gamma(params, gamma, 1)
        return self._pieces(requests[0], params, judge, policy)

    def beam_search(
        self,
        prompts: Prompts,
        *,
        num_beams: int = 4,
        num_return_sequences: int = 1,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        max_new_tokens: int = 64,
        gamma: int = 2,
        draft_beams: int | None = None,
    ) -> list[list[Beam]]:
        """The likeliest continuations that beam search finds, best first, for every prompt
        (paper, A.4).

        Texts, scores and order are those of transformers' beam search of width num_beams. gamma:
        steps that the draft looks ahead, 0 for plain beam search; draft_beams: its width, at least
        num_beams, by itself 4 times that. Both change the speed and, as passes of other shapes
        round otherwise, the last digits of scores: in float64 and float32 only near-ties can fall
        otherwise, in bfloat16 texts differ often. With exact_shapes=True beams and scores are the
        same to the bit. A drafter that is no model cannot look ahead: the search is then plain, and
        `stats.draft_runtime` says "none". Where fewer than num_return_sequences texts are possible,
        so many come back.
        """
        params = BeamParams(num_beams, num_return_sequences, length_penalty, early_stopping)
        width = check_beams(max_new_tokens, gamma, num_beams, draft_beams)
        requests = self.requests(as_list(prompts), max_new_tokens, 0)
        draft = None
        if gamma and isinstance(self.drafter, LMDrafter):
            draft = BeamDraft(self.drafter.model, self.target.vocab_size, width)
        beams: list[list[Beam]] = []
        for i in range(0, len(requests), BATCH):
            with claimed(self.target, self.drafter if draft else None), threads(self.target):
                tasks = beam_search(requests[i : i + BATCH], self.target, params, draft, int(gamma))
            beams += [self._beams(task, draft) for task in tasks]
        return beams

    def _tell_suggested(self, params: SamplingParams) -> None:
        """Warn once, where a call differs from what the model's own generation config suggests."""
        unlike = {n: v for n, v in self.suggested.items() if getattr(params, n) != v}
        if unlike and not self._told:
            self._told = True
            values = ", ".join(f"{name}={value}" for name, value in self.suggested.items())
            flags = " ".join(f"--{n.replace('_', '-')} {v}" for n, v in self.suggested.items())
            log.warning(
                "the model's generation config suggests %s, which is followed only where it is "
                "asked for: %s",
                values,
                flags,
            )

    def _beams(self, task: Task, draft: BeamDraft | None) -> list[Beam]:
        stats = beam_stats(task, self.target.runtime, runtime(self.drafter) if draft else "none")
        beams: list[Beam] = []
        for end in task.search.finished[: task.search.params.num_return_sequences]:
            tokens = end.node.new_tokens
            visible = tokens[:-1] if end.reason == "stop" else tokens
            added = self._text(task.search.request, visible)
            beams.append(Beam(added, tokens, end.score, end.reason, stats))
        return beams

    def _gamma(self, params: SamplingParams, gamma: int | None, rows: int) -> Gamma:
        """The policy that a call asked for."""
        context = self.target.context
        if gamma is None:
            silent = isinstance(self.drafter, NoDrafter)
            return Fixed(0) if silent else Adaptive(self.step_costs(params, rows))
        gamma = int(gamma)  # NumPy's overflow
        if context is not None and gamma + 1 > context:
            raise InputError(
                f"gamma is {shown(gamma)}, but gamma + 1 must fit in the context of {context}"
            )
        return Fixed(gamma)

    def step_costs(self, params: SamplingParams, rows: int = 1) -> Costs:
        """What steps of up to `rows` rows cost here: measured once and kept on disk.

        Takes about a second the first time; the models must be idle.
        """
        rows = 1 << (min(rows, BATCH) - 1).bit_length()  # a power of two: few are ever measured
        kind = costs.kind(params)
        if (kind, rows) not in self._costs:
            name = costs.key(self.target, self.drafter, kind, rows)
            measured = costs.recall(name) if name else None
            if measured is None:
                measured, steady = self._probed(params, rows)
                if name and steady:  # a busy machine's are for this process only
                    costs.keep(name, measured)
            self._costs[kind, rows] = measured
        return self._costs[kind, rows]

    def _probed(self, params: SamplingParams, rows: int) -> Probed:
        """Measured on the target's own text, ends of sequence ignored."""
        prompt, source = self._sides(self._probe_ids())
        room = TOKENS if self.target.context is None else self.target.context - len(prompt)
        request = Request(prompt, min(TOKENS, room), PROBE_KEY, source=source)
        if rows == 1:
            return probe(self._engine, request, params)
        return probe_shared(self.step_costs(params), self._engine, request, params, rows)

    def _probe_ids(self) -> list[int]:
        """A text where it fits the model, else up to four of the same id."""
        V, context = self._readable, self.target.context
        reads = context and context - 1  # one place is for what is generated
        reads = self.target.source_context if self.target.encoder_decoder else reads
        ids = self.tokenizer(PROBE_PROMPT).input_ids if self.tokenizer else []
        if ids and max(ids) < V and (reads is None or len(ids) <= reads):
            return ids
        known = min((i for i in self.ends.eos if 0 <= i < V), default=0)
        return [known] * (4 if reads is None else min(4, reads))

    def requests(self, prompts: list[Prompt], max_new_tokens: int, seed: Seed) -> list[Request]:
        """What `generate` makes of its prompts; InputError for one that cannot be continued."""
        keys = keys_of(seed, len(prompts))
        return [
            self._request(i, prompt, int(max_new_tokens), key)
            for i, (prompt, key) in enumerate(zip(prompts, keys, strict=True))
        ]

    def _request(self, i: int, prompt: Prompt, max_new_tokens: int, key: RowKey) -> Request:
        ids = self.ids(prompt, i)
        head, source = self._sides(ids)
        reads = self.target.source_context if source else self.target.context
        if reads is not None and len(ids) >= reads + (source is not None):
            raise InputError(
                f"prompt {i} has {len(ids)} tokens, the model holds {reads}; give a shorter prompt"
            )
        context = self.target.context
        limit = max_new_tokens if context is None else min(max_new_tokens, context - len(head))
        forced = {}
        if self.ends.forced_bos is not None:
            forced[1 - len(head)] = self.ends.forced_bos  # the second token of the decoder's text
        if self.ends.forced_eos is not None:
            forced[limit - 1] = self.ends.forced_eos
        return Request(head, limit, key, self.ends.eos, source, forced)

    def _sides(self, ids: list[int]) -> tuple[list[int], list[int] | None]:
        """What the decoder continues and what the encoder reads."""
        if not self.target.encoder_decoder:
            return ids, None
        assert self.ends.decoder_start is not None
        return [self.ends.decoder_start], ids

    @property
    def _readable(self) -> int:
        """V of prompts: what the encoder reads has its own vocabulary."""
        return self.target.source_vocab_size or self.target.vocab_size

    def ids(self, prompt: Prompt, i: int = 0) -> list[int]:
        """A prompt's ids, special tokens of the tokenizer included; `i`: its number, for errors."""
        if len(prompt) == 0:
            raise InputError(f"prompt {i} is empty; give a text or ids to continue")
        if isinstance(prompt, str):
            try:
                prompt.encode()
            except UnicodeEncodeError:
                raise InputError(f"prompt {i} is not valid text; give text in UTF-8") from None
            if self.tokenizer is None:
                raise InputError(f"prompt {i} is text, but there is no tokenizer; give token ids")
            prompt = cast(list[int], self.tokenizer(prompt, verbose=False).input_ids)
            if not prompt:
                raise InputError(f"prompt {i} has no tokens; give a text that has some")
        V = self._readable
        for token in prompt:
            if not 0 <= token < V:
                raise InputError(f"prompt {i} holds the id {token}; ids must be in 0..{V - 1}")
        return list(prompt)

    def _pieces(
        self, request: Request, params: SamplingParams, judge: Judge, gamma: Gamma
    ) -> Generator[Piece, None, Completion]:
        stream = text.Stream(self.tokenizer, request.prompt) if self.tokenizer else None
        row, sent = Row.of(request), 0
        for _ in self._engine.run([row], params, judge, gamma):
            tokens, visible = row.new_tokens[sent:], row.visible[sent:]
            sent += len(tokens)
            if tokens:
                last = row.finish_reason is not None
                yield Piece(stream.add(visible, last=last) if stream else None, tokens)
        return self._completion(row)

    def _completion(self, row: Row) -> Completion:
        return Completion(
            text=self._text(row.request, row.visible),
            tokens=row.new_tokens,
            finish_reason=row.finish_reason or "interrupted",
            seed=(row.request.key.seed, row.request.key.row),
            stats=stats(row, self.target.runtime, runtime(self.drafter)),
            steps=row.records,
        )

    def _text(self, request: Request, tokens: list[int]) -> str | None:
        """The text that new tokens add to the prompt's."""
        return text.continued(self.tokenizer, request.prompt, tokens) if self.tokenizer else None


def runtime(drafter: Drafter) -> str:
    """What a drafter runs on: its model's runtime, or Python."""
    return getattr(drafter, "runtime", "python")
