"""Steps as answers show them, and replies as they end."""

from __future__ import annotations

import pytest

from foretoken.records import StepRecord
from foretoken.server.api.answers import ParsedReply, describe_step
from foretoken.server.api.completions import _format_logprobs
from foretoken.server.process.messages import Done, ReplyFacts, StepOutput, TokenLogprob
from foretoken.text.replies.calls import FunctionSignature
from foretoken.text.replies.grammar import ReplyRequirements


@pytest.mark.parametrize(
    ("draft_tokens", "accepted", "kept", "sources", "rejected"),
    [
        ((), 0, (5,), ["plain"], []),
        ((5, 6), 2, (5, 6, 7), ["accepted", "accepted", "bonus"], []),
        ((5, 6), 1, (5, 7), ["accepted", "corrected"], [6]),
        ((5, 6), 0, (7,), ["corrected"], [5, 6]),
        ((5, 6), 2, (5, 6), ["accepted", "accepted"], []),  # the text ended within the draft tokens
    ],
)
def test_where_tokens_come_from(draft_tokens, accepted, kept, sources, rejected) -> None:
    step = StepRecord(len(draft_tokens), draft_tokens, accepted, kept, (), 0, 0.0, 0.0, 0.0, 1)
    told = describe_step(step, {token: f"<{token}>" for token in (*draft_tokens, *kept)})
    assert [token["source"] for token in told["tokens"]] == sources
    assert [token["id"] for token in told["tokens"]] == list(kept)
    assert [token["id"] for token in told["rejected"]] == rejected
    assert [token["text"] for token in told["rejected"]] == [f"<{id}>" for id in rejected]
    assert told["predicted"] is False


CALL = '\n<tool_call>\n{"name": "now", "arguments": {"zone": "sea"}}\n</tool_call>'
NOW = ReplyRequirements((FunctionSignature("now"),))


def fed(
    read: ParsedReply, pieces: str | list[str], done: tuple[str, int | str | None]
) -> ParsedReply:
    """The reply after these pieces, the last of which ends it for this reason."""
    for i, piece in enumerate(pieces):
        end = Done(*done, None, None) if i == len(pieces) - 1 else None  # pyright: ignore
        read.feed(StepOutput(0, [piece], [i], None, [], end))
    return read


@pytest.mark.parametrize(("reason", "stop"), [("length", None), ("stop", "</"), ("stop", 7)])
def test_a_reply_that_is_cut_is_read_without_its_marks(reason: str, stop: int | str | None) -> None:
    """Wherever a limit or a stop string cuts it; a model's own end leaves what it wrote."""
    reply = f"Well.{CALL}{CALL}"
    cuts = range(6, len(reply)) if stop is None else [reply.index("</", 10), reply.rindex("</")]
    for cut in cuts if stop != 7 else [len(reply)]:
        read = fed(
            ParsedReply(ReplyFacts("hermes", is_known=True), NOW, ""), reply[:cut], (reason, stop)
        )
        assert read.text.rstrip() == "Well." and len(read.calls) <= 2
        whole = [call.arguments for call in read.calls if call.is_complete]
        assert whole == ['{"zone": "sea"}'] * reply[:cut].count('"sea"}')
    broken = ParsedReply(ReplyFacts("hermes", is_known=True), NOW, "")
    assert fed(broken, ["Well. <tool"], ("stop", 7)).text == "Well. <tool"


def test_tokens_that_read_alike_have_entries_of_their_own() -> None:
    """As a letter and its byte do in SentencePiece: the token's own is by its name."""
    top = [("a", b"a", -0.5, 3), ("b", b"b", -1.0, 4), ("a", b"a", -2.0, 5)]
    own, other = (
        TokenLogprob("a", b"a", -2.0, top, 5, 3, 0),
        TokenLogprob("c", b"c", -9.0, top, 6, 9, 1),
    )
    told = _format_logprobs([own, other], 3, 2)
    assert told["top_logprobs"] == [
        {"a": -2.0, "token_id:3": -0.5, "b": -1.0},
        {"c": -9.0, "a": -0.5, "b": -1.0, "token_id:5": -2.0},
    ]
    assert told["tokens"] == ["a", "c"] and told["token_logprobs"] == [-2.0, -9.0]


@pytest.mark.parametrize("format", ["hermes", "mistral", "deepseek", "harmony"])
def test_a_chat_without_tools_loses_nothing_where_it_is_cut(format: str) -> None:
    """Neither does one of a model that thinks."""
    for end in ("vector<", "if x ‹", "<th", "list [", "<｜", "<tool_ca"):
        for thinks in (True, False):
            facts = ReplyFacts(format, is_known=True, thinks=thinks)
            reply = fed(ParsedReply(facts, ReplyRequirements(), ""), end, ("length", None))
            assert reply.text == end and reply.thoughts == ""
