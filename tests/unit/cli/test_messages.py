"""Prompts as messages: who says what, and what no line has a use for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from foretoken.cli.prompts import Line, Messages, Template
from foretoken.errors import InputError
from tiny import byte_level

ASKED = {"role": "user", "content": "Where?"}
BRIEF = {"role": "system", "content": "Be brief."}


def wrap(messages: Messages, *lines: Line) -> list[Line]:
    wrapped = [messages.wrapped(line) for line in lines]
    messages.require_used(wrapped)
    return wrapped


def test_prompts_become_messages():
    lines = [Line("Where?", id=3), Line("", messages=[ASKED])]
    assert wrap(Messages(), *lines) == lines
    assert [line.messages for line in wrap(Messages(chat=True), *lines)] == [[ASKED], [ASKED]]
    with_system = wrap(Messages(chat=True, system="Be brief."), *lines)
    assert [line.messages for line in with_system] == [[BRIEF, ASKED], [BRIEF, ASKED]]
    assert with_system[0].id == 3


def test_a_line_s_own_system_wins():
    own = {"role": "developer", "content": "Be long."}
    (line,) = wrap(Messages(system="Be brief."), Line("", messages=[own, ASKED]))
    assert line.messages == [own, ASKED]


def test_options_without_messages(tmp_path):
    for name in ("system", "chat_template", "chat_template_kwargs"):
        with pytest.raises(InputError, match=f"--{name.replace('_', '-')} is for messages, and"):
            wrap(Messages(**{name: "x"}), Line("a"))
    with pytest.raises(InputError, match="^f, line 2: --chat takes a text or messages"):
        wrap(Messages(chat=True), Line([1, 2], place="f, line 2"))
    with pytest.raises(InputError, match="--chat takes a text"):
        wrap(Messages(chat=True), Line(""))


def test_a_template_and_its_variables(tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages[0].content }}{{ mood }}")
    template = Messages(chat_template=file, chat_template_kwargs='{"mood": "!"}').template
    spec = SimpleNamespace(tokenizer=byte_level())
    assert byte_level().decode(template.prompt(Line("", messages=[ASKED]), spec)) == "Where?!"
    assert template.prompt(Line("a"), spec) == "a"
    assert Messages().template == Template()
    with pytest.raises(InputError, match="no such file"):
        Messages(chat_template=tmp_path / "no").template  # noqa: B018
    for given in ("[1]", "null", "3"):
        with pytest.raises(InputError, match="chat_template_kwargs is .*"):
            Messages(chat_template_kwargs=given).template  # noqa: B018
    with pytest.raises(InputError, match="which is no JSON"):
        Messages(chat_template_kwargs="{").template  # noqa: B018
