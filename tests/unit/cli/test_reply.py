"""Texts as they are printed: the text itself is never changed by what is known of its tokens."""

from __future__ import annotations

import pytest

from foretoken.cli.reply import ReplyPart, ReplyToken
from foretoken.cli.session import Printer

ACCEPTED, CORRECTED, BONUS, PLAIN = "accepted", "corrected", "bonus", "plain"
GREEN, BLUE, OFF = "\x1b[32m", "\x1b[1;34m", "\x1b[0m"


@pytest.fixture
def colours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLORTERM": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)


def printed(capsys, *parts: tuple[str, list[tuple[str, str]]], coloured: bool = True) -> str:
    printer = Printer(coloured=coloured)
    for text, tokens in parts:
        printer.put(ReplyPart(text, [ReplyToken(*token) for token in tokens]))
    printer.end()
    return capsys.readouterr().out


def test_a_text_without_colours_is_as_it_came(capsys):
    text = "a\x1b[2J\tb\r\n[bold]c  \n"
    assert printed(capsys, (text, []), ("d", []), coloured=False) == f"{text}d\n"


def test_tokens_have_the_colours_of_their_fates(capsys, colours):
    tokens = [(" the", ACCEPTED), (" cat", CORRECTED), (" sat", BONUS), (" on", PLAIN)]
    shown = printed(capsys, (" the cat sat on", tokens))
    assert shown == f"{GREEN} the{OFF}{BLUE} cat sat{OFF} on\n"


def test_marks_where_there_are_no_colours(capsys):
    tokens = [(" the", ACCEPTED), (" cat", CORRECTED), (" sat", BONUS), (" on", PLAIN)]
    assert printed(capsys, (" the cat sat on", tokens)) == " the [cat sat] on\n"
    lines = [(".\n", CORRECTED), ("\n", CORRECTED)]
    assert printed(capsys, (".\n\n", lines)) == "[.]\n\n\n"


def test_text_that_lags_behind_its_tokens(capsys, colours):
    """A stop string holds back: part of a token, then its rest."""
    parts = ("It", [("It", PLAIN), (" was", ACCEPTED)]), ("", [("!", CORRECTED)]), (" w", [])
    shown = printed(capsys, *parts, ("as!", []))
    assert shown == f"It{GREEN} w{OFF}{GREEN}as{OFF}{BLUE}!{OFF}\n"


def test_tokens_that_are_spelled_otherwise_cost_their_colour_only(capsys, colours):
    """Halves of a character, and special tokens that are no part of the text."""
    tokens = [("a\ufffd", ACCEPTED), ("\ufffd", CORRECTED), (" b", ACCEPTED), ("</s>", BONUS)]
    assert printed(capsys, ("a\U0001f600 b", tokens)) == f"{GREEN}a{OFF}\U0001f600{GREEN} b{OFF}\n"
    assert printed(capsys, ("xyz", [("", ACCEPTED), ("q", CORRECTED)])) == "xyz\n"


def test_markup_and_blanks_are_text(capsys, colours):
    tokens = [("[red]\n\n", PLAIN), ("  x  ", PLAIN)]
    assert printed(capsys, ("[red]\n\n  x  ", tokens)) == "[red]\n\n  x  \n"


def test_a_terminal_is_given_no_orders(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    shown = printed(capsys, ("a\x1b]0;title\x07b\tc\n\x9b2Jd", []), coloured=False)
    assert shown == "a]0;titleb\tc\n2Jd\n"


def test_colours_go_on_after_characters_that_a_terminal_is_not_given(capsys, monkeypatch, colours):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    parts = [(text, [(text, ACCEPTED)]) for text in ("ab", "\r\n", "cd")]
    assert f"{GREEN}cd{OFF}" in printed(capsys, *parts)
    shown = printed(capsys, ("ab", [("ab", ACCEPTED), ("</s>", BONUS)]), ("cd", [("cd", ACCEPTED)]))
    assert shown == f"{GREEN}ab{OFF}{GREEN}cd{OFF}\n"


def test_leftover_tokens_are_not_the_next_text_s(capsys, colours):
    printer = Printer(coloured=True)
    printer.put(ReplyPart("a", [ReplyToken("a", PLAIN), ReplyToken("b", ACCEPTED)]))
    printer.end()
    printer.put(ReplyPart("b", [ReplyToken("b", PLAIN)]))
    printer.end()
    assert capsys.readouterr().out == "a\nb\n" and not printer.begun
