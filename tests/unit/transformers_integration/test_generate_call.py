"""`model.generate(..., custom_generate=spec)` against `model.generate(...)`: the same ids, and what
cannot be honoured is refused in one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    MaxLengthCriteria,
    MaxTimeCriteria,
    MinNewTokensLengthLogitsProcessor,
    StoppingCriteria,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from foretoken import Speculator, load
from foretoken.errors import (
    ControlError,
    ForeignError,
    ForetokenError,
    InputError,
    RefusedError,
)
from foretoken.transformers_integration.generate_call import GenerateCall
from pairs import DEVICE, PROMPTS, V, an_end, relative, target
from refusals import Recorder
from tiny import byte_level, llama, t5

pytestmark = pytest.mark.daily

LIMIT, DRAFT_TOKENS = 16, 3
PLAIN = {"do_sample": False, "max_new_tokens": LIMIT, "pad_token_id": 1}


@pytest.fixture(scope="module", params=["Llama", "T5"])
def pair(request: pytest.FixtureRequest) -> tuple[Any, Speculator]:
    return made(request.param)


@pytest.fixture(scope="module")
def causal() -> tuple[Any, Speculator]:
    return made("Llama")


def made(name: str) -> tuple[Any, Speculator]:
    model: Any = target(name)
    return model, load(model, relative(model), runtime="transformers")


def ours(spec: Speculator, ids: Any, **options: Any) -> Any:
    """`generate` of the Speculator's own model; a fixed gamma, whose cost nobody measures."""
    own = {"custom_generate": spec, "num_assistant_tokens": DRAFT_TOKENS}
    return model_of(spec).generate(torch.tensor(ids, device=DEVICE), **(PLAIN | own | options))


def theirs(spec: Speculator, ids: Any, **options: Any) -> Any:
    return model_of(spec).generate(torch.tensor(ids, device=DEVICE), **(PLAIN | options))


def model_of(spec: Speculator) -> Any:
    return spec.target.model


def mask_of(prompts: list[list[int]], *, right: bool = False) -> tuple[list[Any], torch.Tensor]:
    """Prompts padded to one length, on the left unless told otherwise."""
    width = max(map(len, prompts))
    padding = [[1] * (width - len(prompt)) for prompt in prompts]
    rows, masks = [], []
    for pads, prompt in zip(padding, prompts, strict=True):
        parts, marks = [pads, prompt], [[0] * len(pads), [1] * len(prompt)]
        rows.append(sum(parts[::-1] if right else parts, []))
        masks.append(sum(marks[::-1] if right else marks, []))
    return rows, torch.tensor(masks, device=DEVICE)


class Favour(LogitsProcessor):
    """A user's own: ids after an even one are even rather."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raised = scores.clone()
        raised[:, ::2] += 3.0 * (ids[:, -1:] % 2 == 0)
        return raised


class After(StoppingCriteria):
    """A user's own: ends with the second id that is divisible by 3."""

    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return (ids % 3 == 0).sum(-1) >= 8


CONTROLS: dict[str, dict[str, Any]] = {
    "none": {},
    "max_length": {"max_new_tokens": None, "max_length": 30},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.6},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[3], [13, 60], [45]]},
    "sequence_bias": {"sequence_bias": [[[7], 9.0], [[7, 9], 20.0]]},
    "forced": {"forced_bos_token_id": 11, "forced_eos_token_id": 12},
    "suppress": {"suppress_tokens": [3, 45], "begin_suppress_tokens": [43]},
    "invalid": {"remove_invalid_values": True, "renormalize_logits": True},
    "processor": {"logits_processor": [Favour()]},
    "processor and warper": {"logits_processor": [Favour(), TopKLogitsWarper(3)]},
    "several": {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "suppress_tokens": [3],
        "logits_processor": [Favour()],
    },
    "criterion": {"stopping_criteria": [After()]},
    "length": {"stopping_criteria": [MaxLengthCriteria(23)]},
    "time": {"max_time": 600.0},
    "allowed": {"prefix_allowed_tokens_fn": lambda b, ids: [*range(int(ids[-1]) % 2, V, 2)]},
    "no cache": {"use_cache": False},
    "beams": {"num_beams": 1, "early_stopping": True},
}


@pytest.mark.parametrize("options", CONTROLS.values(), ids=CONTROLS.keys())
def test_greedy_ids_are_those_of_the_model_s_own_generate(pair, options):
    _, spec = pair
    prompt = PROMPTS[1]
    expected = theirs(spec, [prompt], **options)
    assert ours(spec, [prompt], **options).tolist() == expected.tolist()


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"min_new_tokens": 14, "exponential_decay_length_penalty": (4, 1.5)},
        {"min_length": 17},
    ],
)
def test_an_end_of_sequence(pair, more):
    model, spec = pair
    for prompt in PROMPTS[:2]:
        options = {"eos_token_id": an_end(model, prompt, LIMIT)} | more
        expected = theirs(spec, [prompt], **options)
        assert ours(spec, [prompt], **options).tolist() == expected.tolist()


# Batches


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("name", ["none", "repetition_penalty", "processor", "several"])
def test_left_padded_rows_are_those_of_each_alone(causal, name, ended):
    model, spec = causal
    options = dict(CONTROLS[name])
    if ended:
        options["eos_token_id"] = an_end(model, PROMPTS[1], LIMIT)
    rows, mask = mask_of(PROMPTS)
    outputs = ours(spec, rows, attention_mask=mask, **options)
    width = mask.shape[1]
    assert outputs[:, :width].tolist() == rows
    alone = [theirs(spec, [p], **options)[0, len(p) :].tolist() for p in PROMPTS]
    longest = max(map(len, alone))
    assert outputs[:, width:].tolist() == [new + [1] * (longest - len(new)) for new in alone]


def test_a_batch_is_padded_exactly_as_transformers_pads_it(pair):
    model, spec = pair
    eos = an_end(model, PROMPTS[1], LIMIT)
    encoder_decoder = model.config.is_encoder_decoder
    rows, mask = mask_of(PROMPTS, right=encoder_decoder)
    options = {"attention_mask": mask, "eos_token_id": eos}
    assert ours(spec, rows, **options).tolist() == theirs(spec, rows, **options).tolist()


def test_lengths_count_the_padding(causal):
    _, spec = causal
    rows, mask = mask_of(PROMPTS[:2])
    limits = {"max_new_tokens": None, "max_length": 20, "attention_mask": mask}
    expected = theirs(spec, rows, **limits)
    assert ours(spec, rows, **limits).tolist() == expected.tolist()
    assert expected.shape == (2, 20)


# Encoder-decoders


def test_the_encoder_does_not_run_again():
    model, spec = made("T5")
    spec = load(model, "lookup", runtime="transformers")
    calls: list[int] = []
    forward = type(model.get_encoder()).forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.extend([] if self.is_decoder else [1])
        return forward(self, *args, **kwargs)

    rows, mask = mask_of(PROMPTS, right=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model.get_encoder()), "forward", counted)
        ours(spec, rows, attention_mask=mask)
        assert len(calls) == 1
    assert spec.target.shared_encoder_states == {}
    first = spec.generate(PROMPTS[0], max_new_tokens=4, gamma=1)[0]
    assert first.tokens == theirs(spec, [PROMPTS[0]])[0, 1:5].tolist()


def test_a_decoder_may_begin_with_several_ids():
    _, spec = made("T5")
    start = model_of(spec).generation_config.decoder_start_token_id
    options = {"decoder_input_ids": torch.tensor([[start, 7, 9]], device=DEVICE)}
    expected = theirs(spec, [PROMPTS[0]], **options)
    assert ours(spec, [PROMPTS[0]], **options).tolist() == expected.tolist()
    assert expected[0, :3].tolist() == [start, 7, 9]


def test_what_an_encoder_has_read_must_be_ids():
    model, spec = made("T5")
    states = model.get_encoder()(torch.tensor([PROMPTS[0]], device=DEVICE))
    with pytest.raises(RefusedError, match="^encoder_outputs is given"):
        model.generate(encoder_outputs=states, custom_generate=spec, **PLAIN)
    with pytest.raises(RefusedError, match="^inputs_embeds is given"):
        embeds = model.get_input_embeddings()(torch.tensor([PROMPTS[0]], device=DEVICE))
        model.generate(inputs_embeds=embeds, custom_generate=spec, **PLAIN)
    for sound in (torch.zeros(1, 3, 8), torch.full((1, 3), -100), None):
        handed = GenerateCall(
            model, torch.ones(1, 1).long(), model.generation_config, [], [], sound, {}
        )
        with pytest.raises(ForeignError, match="^the encoder got no input_ids"):
            handed.get_sources()


# Sampling


WARPED: list[dict[str, Any]] = [
    {"top_k": 0},
    {"top_k": 5, "temperature": 0.7},
    {"top_k": 0, "top_p": 0.7, "min_p": 0.02},
    {"top_k": 0, "typical_p": 0.6, "epsilon_cutoff": 0.01, "eta_cutoff": 0.05},
    {"top_k": 4, "repetition_penalty": 1.4, "logits_processor": [Favour()]},
    {"top_k": 9, "logits_processor": [TemperatureLogitsWarper(0.5), Favour()], "temperature": 0.5},
]


@pytest.mark.daily("options0", "options5")
@pytest.mark.parametrize("options", WARPED)
def test_the_sampled_distribution_is_the_one_of_transformers(causal, options):
    """The first new token of many rows against the softmax of transformers' own scores."""
    _, spec = causal
    prompt, rows = PROMPTS[0], 1000
    common = {"do_sample": True, "max_new_tokens": 1, "return_dict_in_generate": True}
    scores = theirs(spec, [prompt], output_scores=True, **(common | options)).scores[0]
    distribution = scores[0].double().softmax(-1)
    torch.manual_seed(0)
    options = options | {"num_return_sequences": rows, "max_new_tokens": 1, "do_sample": True}
    outputs = ours(spec, [prompt], num_assistant_tokens=0, **(common | options))
    counts = torch.bincount(outputs.sequences[:, -1], minlength=V)
    assert not counts[distribution == 0].any()
    support = distribution > 0
    chi2 = (
        (counts - rows * distribution)[support] ** 2 / (rows * distribution[support]).clamp(min=1)
    ).sum()
    freedom = int(support.sum()) - 1
    assert chi2 <= freedom + 6 * (2 * freedom) ** 0.5 + 1e-9


# What comes back


TOLD = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


def both(pair: tuple[Any, Speculator], ids: Any, **options: Any) -> tuple[Any, Any]:
    _, spec = pair
    return ours(spec, ids, **(TOLD | options)), theirs(spec, ids, **(TOLD | options))


def near(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    """As near as float32 allows, in which transformers computes scores."""
    assert isinstance(found, tuple) and len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype == torch.float32 and a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.5, "suppress_tokens": [3, 9]},
        {"no_repeat_ngram_size": 2, "renormalize_logits": True},
        {"stopping_criteria": [After()]},
        {"stopping_criteria": [MaxTimeCriteria(600.0)]},
        {"do_sample": True, "top_k": 1, "temperature": 0.7, "renormalize_logits": True},
    ],
)
def test_scores_and_logits(pair, options):
    model, _ = pair
    outputs, expected = both(pair, [PROMPTS[1]], **options)
    kinds = {True: GenerateEncoderDecoderOutput, False: GenerateDecoderOnlyOutput}
    assert type(outputs) is type(expected) is kinds[model.config.is_encoder_decoder]
    assert outputs.sequences.tolist() == expected.sequences.tolist()
    near(outputs.scores, expected.scores)
    near(outputs.logits, expected.logits)
    assert outputs.past_key_values is None


def test_rows_that_have_ended_have_zeros(pair):
    model, _ = pair
    eos = an_end(model, PROMPTS[1], LIMIT)
    outputs, expected = both(pair, [PROMPTS[1], PROMPTS[1][::-1]], eos_token_id=eos)
    assert outputs.sequences.tolist() == expected.sequences.tolist()
    begin = outputs.sequences.shape[1] - len(outputs.scores)
    ended = [False, False]
    for at, (scores, logits) in enumerate(zip(outputs.scores, outputs.logits, strict=True)):
        for b in range(2):
            if ended[b]:
                assert not scores[b].any() and not logits[b].any()
            else:
                near((scores[b],), (expected.scores[at][b],))
                near((logits[b],), (expected.logits[at][b],))
            ended[b] |= outputs.sequences[b, begin + at].item() == eos
    assert any(ended)


def test_a_streamer_is_called_as_transformers_calls_it(pair):
    _, spec = pair
    expected, own = Recorder(), Recorder()
    theirs(spec, [PROMPTS[1]], streamer=expected)
    ours(spec, [PROMPTS[1]], streamer=own)
    assert own.puts == expected.puts and len(own.puts) == 1 + LIMIT
    assert own.ended == expected.ended == 1


# Aliases


def test_transformers_names_for_gamma():
    model: Any = target("Llama")
    spec = load(model, "lookup", runtime="transformers")
    asked: list[int] = []
    propose = spec.drafter.propose
    spec.drafter.propose = lambda gamma, draw: asked.append(gamma[0]) or propose(gamma, draw)
    config = GenerationConfig(num_assistant_tokens=5, **PLAIN)
    for gamma, options in [
        (3, {"num_assistant_tokens": 3, **PLAIN}),
        (4, {"prompt_lookup_num_tokens": 4, "num_assistant_tokens": 3, **PLAIN}),
        (5, {"generation_config": config}),
        (6, {"generation_config": GenerationConfig(prompt_lookup_num_tokens=6, **PLAIN)}),
    ]:
        asked.clear()
        model.generate(torch.tensor([PROMPTS[0]], device=DEVICE), custom_generate=spec, **options)
        assert asked[0] == gamma


# Stop strings


@pytest.mark.parametrize("net", [llama, t5])
def test_stop_strings_end_where_transformers_ends(net):
    model: Any = net(320).double()
    model.generation_config.eos_token_id = None
    tokenizer = byte_level()
    spec = load(model, relative(model), tokenizer=tokenizer, runtime="transformers")
    ids = tokenizer("It was the first", return_tensors="pt").input_ids
    free = model.generate(ids, **PLAIN)[0, -LIMIT:]
    for at in (3, 7, 11):
        strings = [tokenizer.decode(free[at : at + 2])]
        expected = model.generate(ids, stop_strings=strings, tokenizer=tokenizer, **PLAIN)
        options = {"custom_generate": spec, "num_assistant_tokens": 3} | PLAIN
        assert model.generate(ids, stop_strings=strings, **options).tolist() == expected.tolist()
        criterion = {"stopping_criteria": [StopStringCriteria(tokenizer, strings)]}
        assert model.generate(ids, **criterion, **options).tolist() == expected.tolist()


def test_stop_strings_without_a_tokenizer(causal):
    _, spec = causal
    with pytest.raises(InputError, match="^stop_strings needs a tokenizer"):
        ours(spec, [PROMPTS[0]], stop_strings=["a"])


# What is refused


class Broken(LogitsProcessor):
    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise ValueError("mine")


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"num_assistant_tokens": -1}, "gamma is -1; give 0"),
    ({"forced_eos_token_id": V}, "forced_eos_token_id names the id 64"),
    ({"logits_processor": [Broken()]}, "row 0: processor Broken raised ValueError: mine"),
]


@pytest.mark.parametrize(("options", "says"), MISTAKES, ids=[says for _, says in MISTAKES])
@pytest.mark.filterwarnings("ignore")
def test_a_caller_s_mistake_is_named(causal, options, says):
    _, spec = causal
    with pytest.raises(ForetokenError) as error:
        ours(spec, [PROMPTS[0]], **options)
    assert str(error.value).startswith(says) and "\n" not in str(error.value)
    assert not isinstance(error.value, ForeignError)


def test_a_failure_is_a_control_error_that_names_its_row(causal):
    _, spec = causal
    with pytest.raises(ControlError, match="^row 1: processor"):
        ours(spec, [[1, 2], [3, 4]], logits_processor=[OnlyRow()])


class OnlyRow(LogitsProcessor):
    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids[0, 0] == 3:
            raise ValueError("mine")
        return scores


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"logits_processor": [MinNewTokensLengthLogitsProcessor(2, 3, 0, DEVICE)]},
            "MinNewTokensLengthLogitsProcessor depends on positions in the padded batch",
        ),
        ({"stopping_criteria": [After()]}, "After may end one sequence before another"),
        (
            {"stopping_criteria": [MaxTimeCriteria(9.0)]},
            "MaxTimeCriteria may end one sequence before",
        ),
    ],
)
def test_what_a_batch_cannot_have_a_row_can(causal, options, says):
    _, spec = causal
    padded = {"attention_mask": torch.tensor([[0, 1, 1]], device=DEVICE)}
    with pytest.raises(RefusedError, match=f"^{says}"):
        ours(spec, [[5, 2], [3, 4]], **options)
    if "logits_processor" in options:
        with pytest.raises(RefusedError, match=f"^{says}"):
            ours(spec, [[1, 5, 2]], **(options | padded))
    expected = theirs(spec, [[5, 2]], **options)
    assert ours(spec, [[5, 2]], **options).tolist() == expected.tolist()


def test_ids_outside_the_vocabulary(causal):
    _, spec = causal
    with pytest.raises(InputError, match=r"^row 0 of input_ids holds ids outside 0\.\.63"):
        ours(spec, [[5, V]])
