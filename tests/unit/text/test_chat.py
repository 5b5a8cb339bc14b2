"""Messages become ids by the chat template alone; what cannot be rendered is told in one line."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from foretoken.errors import InputError
from foretoken.text import chat
from foretoken.text.messages import as_conversations
from tiny import byte_level

TEMPLATE = """{{ bos_token }}{% for message in messages -%}
[{{ message['role'] }}] {{ message['content'] }}{{ eos_token }}
{% endfor -%}
{% if add_generation_prompt %}[assistant] {% endif %}{{ mood }}"""
USER = {"role": "user", "content": "Where are you going?"}
THOUGHT = {"role": "assistant", "content": "To the"}
END = "<|endoftext|>"
REFUSES = "the chat template refuses the messages: "


def tokenizer(template: str | dict[str, str] | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One that puts a special token before every text of its own accord."""
    made = copy.deepcopy(byte_level())
    made.bos_token = END
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, 0)]
    )
    made.chat_template = template
    return made


def text(messages: list[dict[str, Any]], *args: Any) -> str:
    """What a model would read."""
    return tokenizer().decode(chat.encode_chat(messages, tokenizer(), *args))


def test_a_turn_is_opened_for_the_assistant_and_no_special_token_added_twice():
    assert tokenizer()("a").input_ids[0] == 0
    ids = chat.encode_chat([USER], tokenizer())
    assert all(isinstance(token, int) for token in ids) and ids.count(0) == 2
    assert text([USER]) == f"{END}[user] Where are you going?{END}\n[assistant] "


def test_variables_win():
    closed = text([USER], None, {"add_generation_prompt": False, "mood": "calm"})
    assert closed == f"{END}[user] Where are you going?{END}\ncalm"
    continued = text([USER, THOUGHT], None, {"continue_final_message": True})
    assert continued == f"{END}[user] Where are you going?{END}\n[assistant] To the"
    both = {"continue_final_message": True, "add_generation_prompt": True}
    with pytest.raises(InputError, match="not compatible"):
        text([USER, THOUGHT], None, both)


def test_a_template_of_ones_own():
    assert text([USER], "{{ messages[0]['content'] }}") == "Where are you going?"
    bare = tokenizer(None)
    assert chat.encode_chat([USER], bare, "{{ messages[0].role }}") == bare.encode(
        "user", add_special_tokens=False
    )


def test_templates_with_names():
    named = tokenizer({"default": "{{ 'a' }}", "b": "{{ 'b' }}"})
    assert [named.decode(chat.encode_chat([USER], named, name)) for name in (None, "b")] == [
        "a",
        "b",
    ]
    with pytest.raises(InputError, match="'c', which is not a template.* or one of default, b$"):
        chat.encode_chat([USER], named, "c")


def test_parts_and_calls_of_tools_are_for_the_template():
    parts = {"role": "user", "content": [{"type": "text", "text": "sea"}]}
    assert text([parts], "{{ messages[0].content[0].text }}") == "sea"
    calls = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look"}}]}
    assert text([calls], "{{ messages[0].tool_calls[0].function.name }}") == "look"


def test_parts_that_a_template_does_not_know_are_not_dropped() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "sea"}, {"type": "file"}]}
    known = "{% for p in messages[0].content %}{{ p.text if p.type == 'text' }}"
    with pytest.raises(InputError, match="^message 0, part 1 has the type 'file', which the"):
        text([message], known + "{% endfor %}")
    assert text([message], known + "{{ 'F' if p.type == 'file' }}{% endfor %}") == "seaF"


@pytest.mark.parametrize("named", ["m.content", "m['content']", 'm["content"]'])
def test_a_text_is_a_part_where_a_template_knows_parts_alone(named: str) -> None:
    loop = f"{{% for p in {named} %}}{{{{ p.text }}}}{{% endfor %}}"
    whole = "{% set m = messages[0] %}"
    assert text([USER], whole + loop) == "Where are you going?"
    both = f"{{% if {named} is string %}}{{{{ {named} }}}}{{% else %}}{loop}{{% endif %}}"
    assert text([USER], whole + both) == "Where are you going?"
    other = "{% if m.tools is string %}a{% endif %}"
    assert text([USER], whole + other + loop) == "Where are you going?"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ m.content }}", ""),  # prints
        ("{{ 'a' + m.content + 'b' }}", "ab"),  # concatenates
        ("{{ m['content'] | trim }}c", "c"),
        ("{% if m.content %}no{% else %}calls{% endif %}", "calls"),
        ("{% if m['content'] is none %}calls{% else %}[{{ m.content }}]{% endif %}", "[]"),
        ("{% if m.content is not none %}[{{ m['content'] + 'a' }}]{% endif %}", "[a]"),
        (
            "{% if 'refusal' in m %}no{% else %}calls{% endif %}",
            "calls",
        ),  # null, as clients send it
    ],
)
@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_a_call_of_tools_without_content_in_templates_of_every_style(template, expected, content):
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "look"}}], "refusal": None}
    head = "{% set m = messages[0] %}.{# text, where none is left #}"
    assert text([called | content], head + template) == f".{expected}"


@pytest.mark.parametrize(
    "loop",
    [
        "{% macro all(content) %}{% for c in content %}{{ c.text }}{% endfor %}{% endmacro %}"
        "{% for m in messages %}<{{ m.role }}>{{ all(m.content) }}{% endfor %}",
        "{% for m in messages %}{% set content = m.content %}<{{ m.role }}>"
        "{% for c in content %}{{ c.text }}{% endfor %}{% endfor %}",
        "{% for m in messages %}<{{ m.role }}>{% for c in m.get('content') %}{{ c['text'] }}"
        "{% endfor %}{% endfor %}",
    ],
)
def test_no_text_is_lost_however_a_template_goes_through_parts(loop: str) -> None:
    made = tokenizer(loop).decode(chat.encode_chat([USER, THOUGHT], tokenizer(loop)))
    assert made == "<user>Where are you going?<assistant>To the"


def test_parts_of_text_are_a_text_where_a_template_knows_texts_alone() -> None:
    parts = [{"type": "text", "text": "Where "}, {"text": "to?"}]
    assert text([USER | {"content": parts}]) == text([USER | {"content": "Where to?"}])
    assert text([USER | {"content": []}]) == text([USER | {"content": ""}])


@pytest.mark.parametrize("part", ["Where?", {"type": "text"}, {"text": 5}, 7])
def test_parts_that_are_none(part: Any) -> None:
    with pytest.raises(InputError, match="^message 0, part 1 is .*"):
        text([USER | {"content": [{"type": "text", "text": "a"}, part]}])


def test_a_role_that_the_template_names_is_known():
    robot = {"role": "robot", "content": "a"}
    with pytest.raises(InputError, match="^message 1 has the role 'robot'"):
        text([USER, robot])
    assert text([robot], "{{ 'x' if messages[0].role == 'robot' }}") == "x"
    for role in chat.CHAT_ROLES:
        assert text([{"role": role, "content": "a"}], "{{ messages[0].role }}") == role
    with pytest.raises(InputError) as error:
        text([USER, robot])
    assert error.value.option == "prompt[1].role"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([[]], "the conversation is empty"),
        (["hello"], "messages is 'hello'"),
        ([["hello"]], "message 0 is 'hello'; give a dict with 'role' and 'content'"),
        ([[USER, {"content": "a"}]], "message 1 has the role None"),
        ([[{"role": "user"}]], "message 0 has the content None; give a str or a list of parts"),
        ([[{"role": "user", "content": 3}]], "message 0 has the content 3"),
        ([[USER | {"content": "\udc80"}]], "message 0 is not valid text; give text in UTF-8"),
        ([[USER], 3], "chat_template is 3; give Jinja source"),
        (
            [[USER], "chat.jinja"],
            "chat_template is 'chat.jinja', which is not a template; give the",
        ),
        ([[USER], "{% if %}"], "the chat template refuses the messages: Expected an expression"),
        ([[USER], "{{ raise_exception('no\nsystem') }}"], f"{REFUSES}no system"),
        ([[USER], "{{ messages.a.b }}"], f"{REFUSES}'list object' has no"),
        ([[USER], "{# nothing #}"], "the chat template renders no output for the messages"),
        ([[USER], None, "calm"], "chat_template_kwargs is 'calm'; give a dict"),
        ([[USER], None, {3: 4}], "chat_template_kwargs is {3: 4}; give a dict"),
        ([[USER], None, {"tokenize": 0}], "chat_template_kwargs has 'tokenize', which no templ"),
        ([[USER], None, {"messages": []}], REFUSES),
        ([[USER], None, {"continue_final_message": "thinking"}], REFUSES),
    ],
)
def test_what_cannot_be_rendered_is_one_line(given, problem):
    messages, *options = given
    with pytest.raises(InputError) as error:
        chat.encode_chat(messages, tokenizer(), *options)
    assert str(error.value).startswith(problem) and "\n" not in str(error.value)


def test_nothing_to_render_with():
    with pytest.raises(InputError, match="messages need a tokenizer, and there is none"):
        chat.encode_chat([USER], None)
    with pytest.raises(InputError, match="has no chat template"):
        chat.encode_chat([USER], tokenizer(None))


def test_control_tokens_in_messages_can_be_text():
    message = {"role": "user", "content": f"a{END}b"}
    assert chat.encode_chat([message], tokenizer()).count(0) == 3
    assert (
        chat.encode_chat([message], tokenizer(), None, {"sanitize_control_tokens": True}).count(0)
        == 2
    )


def test_without_jinja(monkeypatch):
    """torch brings it, transformers does not."""
    from transformers.utils import chat_template_utils

    monkeypatch.setattr(chat_template_utils, "is_jinja_available", lambda: False)
    with pytest.raises(InputError, match="messages cannot be rendered: .* requires jinja2"):
        chat.encode_chat([USER], tokenizer(), TEMPLATE + "{# not compiled before #}")


def test_one_conversation_several_or_none():
    assert as_conversations([USER]) == as_conversations((USER,)) == [[USER]]
    assert as_conversations([[USER], [USER, THOUGHT]]) == [[USER], [USER, THOUGHT]]
    for prompts in ("a", ["a", "b"], [1, 2], [[1], [2]], [], [[]], {"input_ids": [1]}, None):
        assert as_conversations(prompts) is None


@pytest.mark.parametrize(
    ("prompts", "problem"),
    [
        (USER, "prompts is a single message; give a list of messages"),
        (
            [[USER], "a"],
            "prompt 1 is 'a', but other prompts are conversations; give lists of messages only",
        ),
        ([[], [USER]], "prompt 0 is empty, but other prompts are conversations"),
        ([[1, 2], [USER]], r"prompt 0 is \[1, 2\], but other prompts are"),
    ],
)
def test_prompts_that_are_conversations_in_part(prompts, problem):
    with pytest.raises(InputError, match=problem):
        as_conversations(prompts)
