from __future__ import annotations

from typing import Any

import pytest

from foretoken.lab.load.trace import Trace

USAGE = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 6}}


def piece(text: str, ids: list[int] | None = None, end: str | None = None) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": end}
    return {"choices": [choice if ids is None else choice | {"token_ids": ids}]}


def traced(*chunks: tuple[float, dict[str, Any]]) -> Trace:
    trace = Trace()
    for seconds, chunk in chunks:
        trace.read(chunk, seconds)
    trace.close()
    return trace


def test_tokens_of_a_chunk_share_its_gap():
    """Two tokens with the first chunk, then one after 2 s and three after 3; the end 1 s later."""
    trace = traced(
        (1.0, piece("ab", [1, 2])),
        (3.0, piece("", [3])),
        (6.0, piece("cdef", [4, 5, 6])),
        (7.0, piece("g", [], "length")),
        (9.0, USAGE),
    )
    assert trace.failure is None and trace.counted
    assert (trace.tokens, trace.prompt_tokens, trace.end) == (6, 5, 7.0)
    assert trace.ttft == 1.0 and trace.tpot == pytest.approx(6 / 5)
    assert trace.gaps(counted=True) == [2.0, 1.0, 1.0, 1.0]
    assert trace.gaps(counted=False) == [2.0, 3.0]


def test_where_chunks_hold_an_unknown_number_of_tokens():
    trace = traced((1.0, piece("")), (2.0, piece("a")), (5.0, piece("b", end="stop")), (6.0, USAGE))
    assert trace.failure is None and not trace.counted and trace.tokens == 6
    assert trace.ttft == 2.0 and trace.gaps(counted=False) == [3.0] and trace.end == 5.0


def test_a_text_of_one_token_has_no_time_a_token():
    usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 1}}
    trace = traced((1.0, piece("a", [1], "length")), (1.0, usage))
    assert trace.ttft == 1.0 and trace.tpot is None and trace.gaps(counted=True) == []


def test_a_text_without_tokens():
    usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 0}}
    trace = traced((1.0, piece("", [], "stop")), (1.0, usage))
    assert trace.failure is None and trace.ttft is None and trace.tpot is None and trace.end == 1.0


@pytest.mark.parametrize(
    ("chunks", "said"),
    [
        ([piece("a", [1]), USAGE], "broke off before the text's end"),
        ([piece("a", [1], "stop")], "told no usage"),
        ([piece("a", [1, 2], "stop"), USAGE], "2 tokens came in chunks, 6 stand in the usage"),
    ],
)
def test_what_is_not_whole_is_a_failure(chunks: list[dict[str, Any]], said: str):
    trace = traced(*((1.0, chunk) for chunk in chunks))
    assert trace.failure is not None and trace.failure[0] == "stream" and said in trace.failure[1]


@pytest.mark.parametrize(
    "chunk",
    [{"choices": [{}]}, {"choices": 3}, {"choices": ["a"]}, {"usage": {"prompt_tokens": 1}}],
)
def test_what_is_no_chunk(chunk: dict[str, Any]):
    with pytest.raises(ValueError, match="a chunk is not as OpenAI's are"):
        Trace().read(chunk, 1.0)
