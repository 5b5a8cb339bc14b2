"""How likely tokens were, in a table and in JSON."""

from __future__ import annotations

from types import SimpleNamespace

from foretoken.cli.answer import _likelihoods as document
from foretoken.cli.answer import show_likelihoods
from foretoken.sampling.logprobs import Logprobs
from tiny import byte_level

NEVER = -float("inf")


def completion(logprobs=None, prompt_logprobs=None):
    return SimpleNamespace(logprobs=logprobs, prompt_logprobs=prompt_logprobs)


def shown(capsys, *args) -> list[list[str]]:
    show_likelihoods(*args)
    return [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]


def test_tables_where_they_were_asked_for(capsys):
    assert shown(capsys, None, [1], completion()) == []
    rows = shown(capsys, None, [1], completion([Logprobs(5, -0.25), Logprobs(6, NEVER)]))
    assert rows[0] == ["token", "logprob"] and rows[2:] == [["5", "-0.250"], ["6", "-inf"]]
    known = [Logprobs(5, -0.25, ((7, -0.125), (5, -0.25)))]
    rows = shown(capsys, None, [1, 5], completion(None, known))
    assert rows[0] == ["prompt", "logprob", "likeliest"]
    assert rows[2:] == [["5", "-0.250", "7", "-0.125", "5", "-0.250"]]


def test_tokens_are_spelled_as_in_the_text(capsys):
    """A part of a character and an end of sequence as the vocabulary has them."""
    tokenizer = byte_level()
    ids = tokenizer("[b] \U0001f40b").input_ids
    known = [Logprobs(token, -1.0) for token in [*ids, 0]]
    rows = shown(capsys, tokenizer, [0], completion(known))[2:]
    spelled = [" ".join(row[:-1]) for row in rows]
    assert (
        spelled[0] == "'['" and spelled[-1] == "<|endoftext|>" and "\ufffd" not in "".join(spelled)
    )


def test_json_has_no_infinity():
    known = [Logprobs(5, NEVER, ((7, -0.125), (5, NEVER)))]
    entry = {"token": 5, "logprob": None, "top": [[7, -0.125], [5, None]]}
    assert document(completion(known)) == {"logprobs": [entry]}
    assert document(completion(None, [])) == {"prompt_logprobs": []}
