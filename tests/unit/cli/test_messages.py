"""Prompts as messages: who says what, and what no line has a use for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from foretoken.cli.messages import Messages, Template
from foretoken.cli.prompts import Line
from foretoken.errors import InputError
from tiny import byte_level

ASKED = {"role": "user", "content": "Where?"}
BRIEF = {"role": "system", "content": "Be brief."}


def test_prompts_become_messages():
    lines = [Line("Where?", id=3), Line("", messages=[ASKED])]
    assert Messages().wrap(lines) == lines
    assert [line.messages for line in Messages(chat=True).wrap(lines)] == [[ASKED], [ASKED]]
    with_system = Messages(chat=True, system="Be brief.").wrap(lines)
    assert [line.messages for line in with_system] == [[BRIEF, ASKED], [BRIEF, ASKED]]
    assert with_system[0].id == 3


def test_a_line_s_own_system_wins():
    own = {"role": "developer", "content": "Be long."}
    (line,) = Messages(system="Be brief.").wrap([Line("", messages=[own, ASKED])])
    assert line.messages == [own, ASKED]


def test_options_without_messages(tmp_path):
    for name in ("system", "chat_template", "chat_template_kwargs"):
        with pytest.raises(InputError, match=f"--{name.replace('_', '-')} is for messages, and"):
            Messages(**{name: "x"}).wrap([Line("a")])
    with pytest.raises(InputError, match="^f, line 2: --chat takes text or messages, not ids"):
        Messages(chat=True).wrap([Line([1, 2], place="f, line 2")])
    with pytest.raises(InputError, match="the prompt is empty"):
        Messages(chat=True).wrap([Line("")])


def test_a_template_and_its_variables(tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages[0].content }}{{ mood }}")
    template = Messages(chat_template=file, chat_template_kwargs='{"mood": "!"}').template
    spec = SimpleNamespace(tokenizer=byte_level())
    assert byte_level().decode(template.prompt(Line("", messages=[ASKED]), spec)) == "Where?!"
    assert template.prompt(Line("a"), spec) == "a"
    assert Messages().template == Template()
    with pytest.raises(InputError, match="no such file; give one with a Jinja template"):
        Messages(chat_template=tmp_path / "no").template  # noqa: B018
    for given in ("[1]", "null", "3"):
        with pytest.raises(InputError, match="chat_template_kwargs is .*; give a JSON object"):
            Messages(chat_template_kwargs=given).template  # noqa: B018
    with pytest.raises(InputError, match="which is no JSON"):
        Messages(chat_template_kwargs="{").template  # noqa: B018


def test_what_cannot_be_rendered_says_where_it_stands():
    spec = SimpleNamespace(tokenizer=None)
    with pytest.raises(InputError, match="^f, line 1: messages need a tokenizer"):
        Template().prompt(Line("", messages=[ASKED], place="f, line 1"), spec)
