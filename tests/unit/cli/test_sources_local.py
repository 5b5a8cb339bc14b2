"""Answers in this process are what `generate` gives, and say what their steps did."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace

import pytest

import foretoken
from foretoken.cli.local_model import LocalModel, open_local_model, require_template
from foretoken.cli.prompts import ChatTemplate
from foretoken.cli.reply import ChatReply, ReplyError
from foretoken.errors import ForetokenError, InputError
from tiny import byte_level, llama, t5

TEMPLATE = ChatTemplate(
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
)
TALK = [{"role": "user", "content": "Where?"}]


@pytest.fixture(scope="module")
def spec() -> foretoken.Speculator:
    models = llama(320, eos_token_id=None), llama(320, seed=1, num_hidden_layers=1)
    return foretoken.load(*models, tokenizer=byte_level())


def opened(
    spec: foretoken.Speculator,
    messages: bool = False,
    template: ChatTemplate = TEMPLATE,
    **speculation,
):
    speculation = {"gamma": 2, "seed": 5, "rule": "block", "lenience": 1.0} | speculation
    return open_local_model(spec, template, messages=messages, **speculation)


def answered(source: LocalModel, prompt, number: int = 0, **sampling):
    """All of an answer: its text, its tokens as they are spelled, and the reply."""
    reply = ChatReply()
    parts = list(source.stream_reply(prompt, sampling, number, reply))
    tokens = [token for part in parts for token in part.tokens]
    return "".join(part.text for part in parts), tokens, reply


@pytest.mark.parametrize("number", [0, 3])
def test_a_text_is_what_generate_gives(spec, number):
    sampling = {"temperature": 1.0, "max_new_tokens": 20}
    (completion,) = spec.generate("It was", gamma=2, seed=[(5, number)], **sampling)
    with opened(spec) as source:
        text, tokens, reply = answered(source, "It was", number, **sampling)
    assert text == completion.text == "".join(token.text for token in tokens)
    fates = [
        "accepted" if i < step.accepted else "corrected" if step.drafted else "plain"
        for step in completion.steps for i in range(len(step.new_tokens))
    ]  # fmt: skip
    assert [token.fate for token in tokens] == fates and {"accepted", "corrected"} <= {*fates}
    stats = completion.stats
    assert (reply.tokens, reply.num_forwards) == (20, stats.target_calls)
    assert reply.finish_reason == "length"
    assert sum(reply.overlaps) / len(reply.overlaps) == pytest.approx(stats.alpha)


def test_lenience_is_the_engine_s(spec):
    (completion,) = spec.generate("It was", gamma=2, seed=[(5, 0)], lenience=0.2, temperature=1.0)
    with opened(spec, lenience=0.2) as source:
        assert answered(source, "It was", temperature=1.0)[0] == completion.text


def test_an_answer_has_as_much_room_as_there_is(spec):
    with opened(spec, messages=True) as source:
        assert source.name == f"{spec.target_name}, {spec.draft_name}"
        _, tokens, reply = answered(source, TALK)
    prompt = spec.inputs.list_prompts([TALK], TEMPLATE.text)[0]
    assert len(tokens) == reply.tokens == spec.target.context - len(prompt)
    with opened(spec) as source:
        assert answered(source, "It was")[2].tokens == 64


def test_a_text_that_is_dropped_leaves_no_row(spec):
    with opened(spec) as source:
        reply = ChatReply()
        with closing(source.stream_reply("It was", {}, 0, reply)) as parts:
            first = next(parts)
        assert source.engine.running == source.engine.waiting == 0
        assert reply.finish_reason is None and 0 < reply.tokens < 64
        whole = answered(source, "It was")[0]
    assert whole.startswith(first.text)


def test_ids_where_there_is_no_tokenizer():
    bare = foretoken.load(llama(64), "none")
    (completion,) = bare.generate([1, 2], max_new_tokens=5)
    with opened(bare, gamma=None) as source:
        text, tokens, _ = answered(source, "1, 2", max_new_tokens=5)
        assert text == ",".join(map(str, completion.tokens))
        assert [token.text for token in tokens] == [str(token) for token in completion.tokens]
        with pytest.raises(InputError, match="no tokenizer, and 'It was' is not ids"):
            answered(source, "It was")


def test_encoder_decoders_continue_too():
    spec = foretoken.load(t5(320), "none", tokenizer=byte_level())
    (completion,) = spec.generate("It was", max_new_tokens=8)
    with opened(spec, gamma=None) as source:
        text, tokens, _ = answered(source, "It was", max_new_tokens=8)
    assert text == completion.text and {token.fate for token in tokens} == {"plain"}


def test_a_text_that_fails_is_not_the_last(spec):
    with opened(spec) as source:
        with pytest.raises(ReplyError, match="no token"):
            answered(source, "It was", suppress_tokens=list(range(320)))
        assert answered(source, "It was", max_new_tokens=3)[2].tokens == 3


def test_what_cannot_be_is_told_at_once(spec):
    bare = foretoken.load(llama(64), "none")
    says = "has no chat template .* --chat-template FILE, .* foretoken chat --raw"
    known, bare_known = (SimpleNamespace(name="m", tokenizer=x) for x in (spec.tokenizer, None))
    with pytest.raises(InputError, match=says):
        require_template(ChatTemplate(), known)
    require_template(TEMPLATE, known)
    with pytest.raises(InputError, match="m has no tokenizer, .*give --tokenizer"):
        require_template(TEMPLATE, bare_known)
    with opened(bare) as source, pytest.raises(ForetokenError, match="tokenizer"):
        source.require({"stop_strings": ["a"]})
    with (
        opened(spec) as source,
        pytest.raises(InputError, match="the model's context length is 96"),
    ):
        answered(source, "It was " * 100)
