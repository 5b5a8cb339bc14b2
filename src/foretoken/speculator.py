"""The main class: `foretoken.load` returns a `Speculator`, which turns prompts into completions."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Event
from typing import TYPE_CHECKING, Any, Unpack

from foretoken.costing.gamma import GammaPolicy
from foretoken.costing.pair_costs import PairCosts
from foretoken.drafters.base import Drafter, list_parts, require_drafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.engine.core import EngineCore
from foretoken.engine.output_stream import decode_output, make_output_stream
from foretoken.errors import InputError, get_base_name
from foretoken.generation_config import EndTokens, warn_about_suggested
from foretoken.inputs import InputProcessor, Prompt, Prompts, Seed, resolve_verifier
from foretoken.models.base import Model
from foretoken.models.guidance import GuidedModel
from foretoken.request import (
    Completion,
    OutputPredictor,
    Piece,
    Request,
    SequenceState,
    compute_stats,
)
from foretoken.sampling.acceptance_rules import Rule
from foretoken.sampling.checks import as_ids
from foretoken.sampling.params import Controls, SamplingParams
from foretoken.sampling.verifier import Verifier
from foretoken.transformers_integration.generate_call import GenerateCall, build_stop_criteria
from foretoken.transformers_integration.unsupported import (
    read_withheld_arguments,
    require_same_model,
    require_single_row,
)

MAX_BATCH_SIZE = 16  # maximum number of running sequences, without an engine
if TYPE_CHECKING:
    from torch import Tensor
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.generation.streamers import BaseStreamer


@dataclass(slots=True, eq=False)
class Speculator:
    """A target, a drafter and optionally a tokenizer, ready to generate.

    `foretoken.load` returns a Speculator; `dataclasses.replace` makes a changed copy, which shares
    the models. Several threads may use a Speculator at the same time.

    Attributes:
        target: The model whose distribution the output follows.
        drafter: Proposes the draft tokens.
        tokenizer: The tokenizer for prompts and outputs; None if only ids are used.
        ends: The start and stop ids, from the model's configuration.
        controls: Options of `generate` that the model's generation config sets: defaults for calls
            that do not set them.
        target_name: The target's name, for messages and stored costs.
        draft_name: The draft's name, for messages and stored costs.
        suggested: Sampling options that the model's generation config suggests. They are not
            applied; a warning lists them once.
        predicted_output: Function that returns an output predictor for a request without a
            `prediction`; None: only the drafter proposes tokens for such a request.
        processor: Function that loads the model's processor of images and audio; None if the model
            has none.
        structure: Function that builds the target's transformers model, with or without weights;
            None if no such function is known.
        choose: Function that `prepared` calls to measure which draft is the fastest; None if there
            is nothing to choose.

    Examples:
        >>> import foretoken
        >>> spec = foretoken.load("novels")
        >>> (out,) = spec.generate("The captain looked", max_new_tokens=8, gamma=3)
        >>> out.text
        ' at the doctor, and the doctor said'
    """

    target: Model = field(repr=False)
    drafter: Drafter = field(repr=False)
    tokenizer: PreTrainedTokenizerBase | None = field(default=None, repr=False)
    ends: EndTokens = field(default=EndTokens(), repr=False)
    controls: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)
    target_name: str = "target"
    draft_name: str = "draft"
    suggested: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)
    predicted_output: Callable[[Request], OutputPredictor] | None = field(default=None, repr=False)
    choose: Callable[[Speculator], Speculator] | None = field(default=None, repr=False)
    processor: Callable[[], Any] | None = field(default=None, repr=False)
    structure: Callable[[], Any] | None = field(default=None, repr=False)
    inputs: InputProcessor = field(init=False, repr=False)
    costing: PairCosts = field(init=False, repr=False)
    core: EngineCore = field(init=False, repr=False)
    _has_warned: Event = field(default_factory=Event, init=False, repr=False)

    def __post_init__(self) -> None:
        target, drafter = self.target, require_drafter(self.drafter)
        core = EngineCore(target, drafter, MAX_BATCH_SIZE)
        inputs = InputProcessor(
            target,
            self.tokenizer,
            self.ends,
            self.controls,
            self.predicted_output,
            self.processor,
        )
        pair = ", ".join(map(get_base_name, (self.target_name, self.draft_name)))
        costing = PairCosts(target, drafter, inputs, core, MAX_BATCH_SIZE, pair)
        object.__setattr__(self, "drafter", drafter)
        self.core, self.inputs, self.costing = core, inputs, costing

    def __setattr__(self, name: str, value: object) -> None:
        if hasattr(self, name):
            raise InputError(
                f"the {name} of a Speculator cannot be changed; make another Speculator with "
                f"dataclasses.replace(spec, {name}=...)"
            )
        object.__setattr__(self, name, value)

    @property
    def exact(self) -> str:
        """Return whether the draft tokens or the other sequences of a batch can change an output.

        This concerns greedy outputs and outputs with rule="coupled". The output always has the
        target's distribution.

        Returns:
            "bitwise": no output changes, as tested with the model's own weights. "rounding": draft
            tokens and other sequences change the last digits of logits, so a near-tie between two
            tokens may be decided differently.

        Example:
            >>> import foretoken
            >>> foretoken.load("novels", runtime="transformers").exact
            'rounding'
        """
        return "bitwise" if self.target.capabilities.batch_invariant else "rounding"

    def prepared(self) -> Speculator:
        """Return a Speculator of this target with the draft that is the fastest on this machine.

        The method chooses the draft or the draft's precision, whichever was not given to `load`. It
        converts the candidate drafts if necessary and measures all of them, which may take minutes.
        The choice is stored, and later calls of `load` use it. If `load` has chosen CUDA graphs,
        the method also compiles their layers, which takes seconds. Call this method while nothing
        is being generated.

        Returns:
            The Speculator to use from now on; this Speculator if there is nothing to choose.

        Examples:
            >>> import foretoken
            >>> spec = foretoken.load("novels")  # a pair: its draft is given
            >>> spec.prepared() is spec
            True
        """
        for part in list_parts(self.target, self.drafter):
            if isinstance(part, Model):
                part.prepare()
        return self if self.choose is None else self.choose(self)

    def guided(self, scale: float, negative: Prompt | None = None) -> Speculator:
        """Return a Speculator of this pair with classifier-free guidance.

        The target's logits are then c + (scale - 1) (c - u). Here c are the target's logits after
        the prompt and the output so far, and u are its logits after `negative` and the same output.
        One forward pass computes c and u. The drafter proposes without guidance.

        Args:
            scale: The weight of c; 1 is no guidance.
            negative: The negative prompt, as text or ids, used for all prompts. None: the last
                token of each prompt, as with `guidance_scale` of transformers.

        Returns:
            The new Speculator. It shares its models with this Speculator, so only one of the two
            may generate at a time.

        Raises:
            InputError: `scale` is not a number, or `negative` is not a prompt.
            RefusedError: The target has an encoder, or the draft uses the target's hidden states.

        Examples:
            >>> import foretoken
            >>> spec = foretoken.load("novels").guided(1.5, "It was a dark")
            >>> (out,) = spec.generate("The captain looked", max_new_tokens=8, gamma=3)
            >>> len(out.tokens)
            8
        """
        if negative is not None and not isinstance(negative, str):
            negative = list(as_ids("negative", negative))
        ids = None if negative is None else self.inputs.encode_prompt(negative, "negative")
        return replace(self, target=GuidedModel(self.target, scale, ids), choose=None)

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        gamma: int | None = None,
        seed: Seed = 0,
        rule: str | Rule = "block",
        lenience: float = 1.0,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **controls: Unpack[Controls],
    ) -> list[Completion]:
        """Generate completions from the target's distribution (paper, Algorithm 1).

        A KeyboardInterrupt ends the call early: unfinished sequences are returned with
        finish_reason "interrupted". A sequence whose controls leave no token is returned with
        finish_reason "error", and its `error` is the message.

        Args:
            prompts: One prompt or several. A prompt is a str, a list of ids or a list of messages,
                to which the chat template is applied. Ids may also be tensors or arrays, `[n]` for
                one prompt and `[B, n]` for B prompts, or a tokenizer's output, whose padding is
                dropped.
            params: One SamplingParams for all prompts, or a list with one for each.
            gamma: Draft tokens for each target forward; 0 is plain decoding. None: chosen before
                every step, from costs measured once and the acceptance so far.
            seed: An int: sequence i then has the key (seed, i); or a list with an int or a pair
                (seed, number) for each prompt. None: a random int.
            rule: The acceptance method: "block", "speculative", "match", "rejection", "coupled", or
                a function (docs/exactness.md). With "coupled" and one seed, the output is the same
                with every drafter and gamma. At temperature 0, draft tokens that equal the argmax
                are accepted with every rule, and a function is not called.
            lenience: Below 1, draft tokens are accepted up to 1 / lenience times as often (paper,
                appendix A.5), and the output does not follow the target's distribution exactly;
                `stats.bias` is the deviation. At temperature 0 a draft token is accepted if it has
                at least `lenience` times the probability of the most probable token.
            chat_template: A Jinja template for messages; None: the tokenizer's template.
            chat_template_kwargs: Values of the template's variables, by name.
            **controls: Fields of SamplingParams, in place of `params`.

        Returns:
            The completions in the order of the prompts, `SamplingParams.num_return_sequences` for
            each prompt.

        Raises:
            InputError: An option or a prompt is invalid.
            RefusedError: Options contradict one another, or cannot be followed exactly.
            ControlError: The controls of every sequence leave no token.
            NumericsError: The logits of every sequence are invalid.

        Examples:
            >>> import foretoken
            >>> spec = foretoken.load("novels")
            >>> prompts = ["The captain looked", "It was a cold"]
            >>> params = foretoken.SamplingParams(temperature=0.7, max_new_tokens=8)
            >>> one, two = spec.generate(prompts, params, seed=1, gamma=3)
            >>> len(one.tokens), one.finish_reason
            (8, 'length')
            >>> (again,) = spec.generate(prompts[1], params, seed=[(1, 1)], gamma=3)
            >>> again.text == two.text
            True
        """
        verifier = resolve_verifier(gamma, rule, lenience)
        template = chat_template, chat_template_kwargs
        requests = self.inputs.assemble("generate", prompts, params, controls, seed, *template)
        if not requests:
            return []
        seqs = self.inputs.make_sequences(requests)
        completions = list(self.generate_completions(seqs, verifier, gamma))
        _require_success(seqs)
        return completions

    def generate_completions(
        self, seqs: list[SequenceState], verifier: Verifier, gamma: int | None
    ) -> Generator[Completion]:
        """Yield the completions of these sequences in order, each as soon as its sequence and all
        earlier sequences are finished. If a sequence fails, its completion has the error: no
        exception is raised, even if all sequences fail."""
        requests = [seq.request for seq in seqs]
        self.warn_about_suggested([request.params for request in requests])
        policy = self.costing.make_policy(requests, gamma, len(requests))
        unfinished = deque(seqs)
        try:
            for _ in self.core.run(seqs, verifier, policy):
                while unfinished and unfinished[0].finish_reason is not None:
                    yield self.make_completion(unfinished.popleft())
        except KeyboardInterrupt:  # unfinished sequences are returned, marked "interrupted"
            pass
        yield from map(self.make_completion, unfinished)

    def stream(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        gamma: int | None = None,
        seed: Seed = 0,
        rule: str | Rule = "block",
        lenience: float = 1.0,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **controls: Unpack[Controls],
    ) -> Generator[Piece, None, Completion | list[Completion]]:
        """Generate as `generate` does, and yield the output in pieces.

        The pieces of a sequence concatenate to the text and tokens of the completion that
        `generate` returns. Text is withheld while it may be the beginning of a stop string.
        Arguments are those of `generate`.

        Yields:
            After each step, a piece for every sequence that has new tokens; `piece.row` is the
            index of the sequence.

        Returns:
            As the generator's return value: the completion, or a list of completions if there are
            several prompts or outputs.

        Raises:
            InputError: `prompts` is empty. Also the errors of `generate`.

        Examples:
            >>> import foretoken
            >>> spec = foretoken.load("novels")
            >>> pieces = list(spec.stream("The captain looked", max_new_tokens=8, gamma=3))
            >>> "".join(piece.text for piece in pieces)
            ' at the doctor, and the doctor said'
        """
        verifier = resolve_verifier(gamma, rule, lenience)
        template = chat_template, chat_template_kwargs
        requests = self.inputs.assemble("stream", prompts, params, controls, seed, *template)
        if not requests:
            raise InputError("stream takes one prompt or more, not 0; give a prompt")
        seqs = self.inputs.make_sequences(requests)
        self.warn_about_suggested([request.params for request in requests])
        return self._stream_pieces(
            seqs, verifier, self.costing.make_policy(requests, gamma, len(seqs))
        )

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        *,
        generation_config: GenerationConfig,
        logits_processor: Sequence[Any] = (),
        stopping_criteria: Sequence[Any] = (),
        inputs_tensor: Tensor | None = None,
        streamer: BaseStreamer | None = None,
        stop_strings: str | list[str] | None = None,
        num_assistant_tokens: int | None = None,
        prompt_lookup_num_tokens: int | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Generate from the model's distribution within a call of transformers' `generate`.

        `model.generate(**inputs, custom_generate=spec, ...)` makes this call. Each row of
        `input_ids` becomes a sequence of its own without the row's padding, but `max_length` and
        `min_length` count the padding. With sampling, the seed is drawn from torch's global
        generator, so `torch.manual_seed` makes the output repeatable, but the output differs from
        the output of transformers. The returned scores and logits of finished sequences are zeros.
        If this Speculator's target is a converted model, it is not fully compared with `model`:
        only the vocabulary sizes must be equal, and both or neither must have an encoder.

        Args:
            model: The model whose `generate` was called.
            input_ids: The prompts, `[B, n]`.
            generation_config: The call's settings.
            logits_processor: Functions of one sequence's ids `[1, n]` and scores `[1, V]`.
            stopping_criteria: Functions of one sequence's ids `[1, n]`, with None for scores.
            inputs_tensor: The encoder's input, for an encoder-decoder.
            streamer: A streamer of transformers.
            stop_strings: Strings that end an output, which this Speculator's tokenizer decodes.
            num_assistant_tokens: gamma.
            prompt_lookup_num_tokens: gamma, if the drafter is a look-up.
            **model_kwargs: Arguments of the model's forward, such as an attention mask.

        Returns:
            The result of transformers' `generate`: ids `[B, n]`, or its output object.

        Raises:
            ForeignError: The call needs a feature that is not supported: a beam search, attentions,
                hidden states, a cache, an assistant. There is no fallback to transformers here.

        Examples:
            >>> import foretoken, torch
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
            >>> config = LlamaConfig(vocab_size=64, num_hidden_layers=1, **shape)
            >>> model = LlamaForCausalLM(config).eval()
            >>> spec = foretoken.load(model, "lookup")
            >>> ids, greedy = torch.tensor([[5, 6, 7]]), {"max_new_tokens": 4, "do_sample": False}
            >>> out = model.generate(ids, custom_generate=spec, num_assistant_tokens=2, **greedy)
            >>> torch.equal(out, model.generate(ids, **greedy))
            True
        """
        # CAUTION: reads the local variables of transformers' `generate`, which does not pass a
        # streamer or an assistant to a custom_generate (transformers_integration/unsupported.py)
        arguments = read_withheld_arguments(sys._getframe(1))
        streamer = arguments.get("streamer") if streamer is None else streamer
        require_single_row(streamer, len(input_ids))
        require_same_model(model, self.target, arguments)
        strings = build_stop_criteria(stop_strings, self.tokenizer)
        task = GenerateCall(
            model,
            input_ids,
            generation_config,
            logits_processor,
            [*stopping_criteria, *strings],
            inputs_tensor,
            model_kwargs,
        )
        looks_up = isinstance(self.drafter, LookupDrafter)
        gamma = task.choose_gamma(num_assistant_tokens, prompt_lookup_num_tokens, looks_up=looks_up)
        verifier = resolve_verifier(gamma, "block", 1.0)
        requests = task.build_requests(self.target)
        policy = self.costing.make_policy(requests, gamma, len(requests))
        seqs = self.inputs.make_sequences(requests)
        steps = self.core.run(seqs, verifier, policy)
        return task.decode(seqs, steps, self.target, streamer)

    def warn_about_suggested(self, params: Sequence[SamplingParams]) -> None:
        """Warn once if these params differ from values that the generation config suggests."""
        if not self._has_warned.is_set() and warn_about_suggested(self.suggested, params):
            self._has_warned.set()

    def _stream_pieces(
        self, seqs: list[SequenceState], verifier: Verifier, gamma: GammaPolicy
    ) -> Generator[Piece, None, Completion | list[Completion]]:
        outputs = [
            make_output_stream(seq, self.tokenizer, number) for number, seq in enumerate(seqs)
        ]
        for _ in self.core.run(seqs, verifier, gamma):
            with self.core.pause():
                pieces = [output.take_piece() for output in outputs]
            yield from (piece for piece in pieces if piece is not None)
        _require_success(seqs)
        completions = [self.make_completion(seq) for seq in seqs]
        return completions if len(completions) > 1 else completions[0]

    def make_completion(self, seq: SequenceState) -> Completion:
        """Return a completion; for an unfinished sequence, finish_reason is "interrupted"."""
        self.costing.monitor_drift(seq)
        params = seq.request.params
        return Completion(
            text=decode_output(seq, self.tokenizer),
            tokens=seq.new_tokens,
            finish_reason=seq.finish_reason or "interrupted",
            seed=(seq.request.key.seed, seq.request.key.number),
            stats=compute_stats(seq, self.target.runtime, self.drafter.runtime),
            steps=seq.records,
            stop_reason=seq.stop_reason,
            error=None if seq.error is None else str(seq.error),
            logprobs=None if params.logprobs is None else seq.logprobs,
            prompt_logprobs=None if params.prompt_logprobs is None else seq.prompt_logprobs,
        )


def _require_success(seqs: list[SequenceState]) -> None:
    """Raise the error of the first sequence if all sequences failed."""
    if all(seq.error is not None for seq in seqs):
        seqs[0].raise_error(0)
