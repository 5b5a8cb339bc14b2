"""Turns that are kept, taken back, saved and loaded."""

from __future__ import annotations

import json

import pytest

from foretoken.cli.session import Conversation
from foretoken.errors import InputError

SYSTEM = {"role": "system", "content": "Be brief."}


def turn(user: str, assistant: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def test_turns_and_the_system_s_message():
    talk = Conversation()
    assert talk.asked("a") == turn("a", "")[:1] and talk.messages == []
    talk.keep("a", "b")
    assert talk.messages == turn("a", "b")
    assert talk.asked("c") == [*turn("a", "b"), {"role": "user", "content": "c"}]
    talk.system("Be brief.")
    assert talk.messages == [SYSTEM, *turn("a", "b")]
    talk.system("Be long.")
    assert [m["content"] for m in talk.messages] == ["Be long.", "a", "b"]
    assert talk.system("") == "there is no system's message" and talk.messages == turn("a", "b")


def test_undo_and_reset():
    talk = Conversation([SYSTEM, *turn("a", "b"), *turn("c\nd " * 30, "e")])
    assert talk.undo() == f"taken back: {('c d ' * 15)[:60]}..."
    assert talk.messages == [SYSTEM, *turn("a", "b")]
    talk.keep("x", "y")
    talk.reset()
    assert talk.messages == [SYSTEM]
    with pytest.raises(InputError, match="no turn to take back"):
        talk.undo()


def test_what_is_saved_is_loaded(tmp_path):
    talk, file = Conversation([SYSTEM, *turn("naïve \U0001f600", "b")]), tmp_path / "talk.json"
    assert talk.save(str(file)) == f"3 messages are in {file}"
    assert json.loads(file.read_text(encoding="utf-8")) == talk.messages
    other = Conversation(turn("x", "y"))
    assert other.load(str(file)) == f"3 messages are from {file}"
    assert other.messages == talk.messages
    with pytest.raises(OSError, match="cannot be written"):
        talk.save(str(tmp_path / "no" / "talk.json"))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "there is no such file; give one with messages"),
        ("[{", "talk.json holds no conversation: "),
        ("{}", "messages is {}; give a list of messages"),
        ("[]", "the conversation is empty"),
        ('[{"role": "user"}]', "message 0 has the content None"),
        ('["a"]', "message 0 is 'a'"),
    ],
)
def test_files_that_hold_none(tmp_path, content, says):
    file, talk = tmp_path / "talk.json", Conversation(turn("a", "b"))
    if content is not None:
        file.write_text(content)
    with pytest.raises(InputError) as error:
        talk.load(str(file))
    assert says in str(error.value) and talk.messages == turn("a", "b")
