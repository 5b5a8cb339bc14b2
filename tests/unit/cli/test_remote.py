"""A client of servers: of a foreign one, a test double that replays bytes (tests/foreign.py), and
of ours in tests/e2e/test_clients.py."""

from __future__ import annotations

from contextlib import closing

import pytest

from foreign import MODELS, Answer, body, chat, event, refusal, replaying, said, streamed
from foretoken.cli import remote_model as module
from foretoken.cli.remote_model import get_address, get_json, make_client, open_remote_model
from foretoken.cli.reply import ChatReply, ReplyError, ReplyToken
from foretoken.errors import InputError

TALK = [{"role": "user", "content": "Where?"}]
FACTS = {"target": "t", "draft": "d", "chat": True}
STEP = {
    "tokens": [{"id": 1, "text": " a", "source": "accepted"}]
    + [{"id": 2, "text": " b", "source": "corrected"}],
    "rejected": [{"id": 3, "text": " c"}, {"id": 4, "text": " d"}],
    "gamma": 3,
    "overlaps": [0.9, 0.5],
}


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def opened(url: str, key=None, model=None, variables=None, *, messages=True, seed=None, **how):
    return open_remote_model(
        url, key, model, variables, messages=messages, seed=seed, speculation=how
    )


def answered(
    source, prompt=TALK, number: int = 0, **sampling
) -> tuple[str, list[ReplyToken], ChatReply]:
    reply = ChatReply()
    parts = list(source.stream_reply(prompt, sampling, number, reply))
    text = "".join(part.text for part in parts)
    return text, [token for part in parts for token in part.tokens], reply


def test_a_foreign_server_s_answer():
    with replaying(chat=[said("It", " was", " naïve \U0001f600\u2028.")]) as server:
        with opened(server.url + "/v1/") as source:
            text, tokens, reply = answered(source)
        assert text == "It was naïve \U0001f600\u2028." and tokens == []
        assert reply.finish_reason == "stop" and reply.tokens == 3 and reply.num_forwards == 0
        assert source.name == f"other at {server.url}"
    assert server.bodies("/v1/chat/completions") == [
        {
            "model": "other",
            "stream": True,
            "stream_options": {"include_usage": True},
            "messages": TALK,
        }
    ]


@pytest.mark.parametrize(("asked", "sent"), [(None, {"temperature": 0.0}), (0.6, {})])
def test_the_model_s_sampling_is_the_server_s_to_follow(asked, sent):
    """As a model in this process: where its generation config asks for nothing, it is greedy."""
    facts = FACTS | {"temperature": asked}
    with replaying(chat=[said("a")], speculation=[body(facts)]) as server:
        with opened(server.url) as source:
            answered(source)
    (payload,) = server.bodies("/v1/chat/completions")
    assert {n: v for n, v in payload.items() if n in ("temperature", "max_tokens")} == sent


def test_an_answer_ends_at_the_default_limit(monkeypatch):
    """Which is not sent: a server refuses what the context has no room for."""
    monkeypatch.setattr(module, "DEFAULT_ANSWER_TOKENS", 3)
    with replaying(chat=[said("a", "b", "c", "d"), said("a", "b", "c", "d")]) as server:
        with opened(server.url) as source:
            text, _, reply = answered(source)
            assert (text, reply.tokens, reply.finish_reason) == ("abc", 3, "length")
            assert answered(source, max_new_tokens=9)[0] == "abcd"
    bare, own = server.bodies("/v1/chat/completions")
    assert "max_tokens" not in bare and own["max_tokens"] == 9


def test_ours_says_what_became_of_the_draft_tokens():
    chunk = chat(" a b") | {"speculation": {"steps": [STEP]}}
    end = chat(None, "length") | {"speculation": {"steps": []}}
    with replaying(chat=[streamed(chunk, end)], speculation=[body(FACTS)]) as server:
        with opened(server.url, gamma=3, lenience=0.5) as source:
            text, tokens, reply = answered(source)
    assert text == " a b" and tokens == [
        ReplyToken(" a", "accepted"),
        ReplyToken(" b", "corrected"),
    ]
    assert (reply.tokens, reply.num_forwards, reply.overlaps) == (2, 1, [0.9, 0.5])
    assert reply.finish_reason == "length" and source.name == f"other at {server.url}, d"
    (payload,) = server.bodies("/v1/chat/completions")
    assert payload["speculation"] == {"steps": True, "gamma": 3, "lenience": 0.5}


def test_completions():
    texts = [{"choices": [{"index": 0, "text": t, "finish_reason": None}]} for t in ("a", " b")]
    texts[1]["choices"][0]["finish_reason"] = "length"
    with replaying(completions=[streamed(*texts)]) as server:
        with opened(server.url, model="m", messages=False, seed=2**63 - 1) as source:
            assert answered(source, "It was", 1)[0] == "a b"
    (payload,) = server.bodies("/v1/completions")
    assert payload["prompt"] == "It was" and payload["max_tokens"] == 64 and payload["seed"] == 0
    assert payload["model"] == "m" and not server.bodies("/v1/models")


def test_options_have_the_names_of_the_api():
    sampling = {"temperature": 0.5, "top_k": 3, "min_p": 0.1, "max_new_tokens": 9, "top_p": 0.9}
    sampling |= {"stop_strings": ["x"], "stop_token_ids": [4], "include_stop_string": True}
    sampling |= {"logit_bias": {"5": 1.5}, "ignore_eos": True, "min_new_tokens": 2}
    names = ("stop_strings", "include_stop_string", "min_new_tokens", "max_new_tokens")
    sent = ("stop", "include_stop_str_in_output", "min_tokens", "max_tokens")
    variables = {"enable_thinking": False}
    with replaying(chat=[said("a")]) as server, opened(server.url, variables=variables) as source:
        answered(source, **sampling)
    (payload,) = server.bodies("/v1/chat/completions")
    renamed = dict(zip(names, sent, strict=True))
    assert {renamed.get(n, n): v for n, v in sampling.items()}.items() <= payload.items()
    assert payload["chat_template_kwargs"] == {"enable_thinking": False}


SCHEMA = {"name": "answer", "schema": {"type": "integer"}, "strict": True}


@pytest.mark.parametrize(
    ("structured", "prompt", "sent"),
    [
        (
            {"json_schema": {"type": "integer"}},
            TALK,
            {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
        ),
        ({"json_schema": {}}, "It", {"structured_outputs": {"json": {}}}),
        ({"lark": "start: /a/"}, TALK, {"structured_outputs": {"grammar": "start: /a/"}}),
        ({"choice": ["a"]}, "It", {"structured_outputs": {"choice": ["a"]}}),
    ],
)
def test_what_a_text_must_match(structured, prompt, sent):
    end = {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}
    with replaying(chat=[said("a")], completions=[streamed(end)]) as server:
        with opened(server.url, messages=False) as source:
            answered(source, prompt, structured=structured)
    assert sent.items() <= server.requests[-1][1].items()


def test_a_wish_without_a_name_is_refused():
    with replaying() as server, opened(server.url) as source:
        with pytest.raises(InputError, match="typical_p does not exist in a server's API"):
            source.require({"typical_p": 0.5})
        with pytest.raises(InputError, match="top_p is 2"):
            source.require({"top_p": 2})


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        (refusal(400, "temperature is\n9."), InputError, "^temperature is 9$"),
        (refusal(404, "no model 'm'"), InputError, "^no model 'm'$"),
        (body({"error": "plain words"}, 422), InputError, "^the server answers 422 "),
        (body({"detail": "x"}, 403), InputError, "^the server answers 403 Forbidden$"),
        (Answer([b"<html>"], 502), ReplyError, "^the server answers 502 Bad Gateway$"),
        (Answer([b""], 301, {"location": "/x"}), InputError, "^the server answers 301 Moved"),
        (refusal(500, "it broke\x1b[2J"), ReplyError, r"^it broke \[2J$"),
        (refusal(503, "no engine"), ReplyError, "^no engine$"),
        (refusal(429, "full", Retry_After="3600"), ReplyError, "^full$"),
        (body({"choices": []}), ReplyError, "the server closed the stream before"),
        (streamed(chat("a"), {"error": {"message": "out of rows"}}), ReplyError, "^out of rows$"),
        (streamed({"error": "plain words"}), ReplyError, "^plain words$"),
        (streamed(chat("a")), ReplyError, "the server closed the stream before"),
        (streamed(chat("a"), done=False), ReplyError, "the server closed the stream before"),
        (streamed("{nonsense"), ReplyError, "the server sent invalid JSON: "),
        (streamed("[1]"), ReplyError, r"the server sent an invalid chunk: \[1\]"),
        (streamed({"choices": [{"delta": 5}]}), ReplyError, "sent an invalid chunk: "),
        (streamed({"choices": 5}), ReplyError, "sent an invalid chunk: "),
        (streamed({"usage": {"x": 1}}), ReplyError, "sent an invalid chunk: "),
        (streamed({"speculation": {"steps": [{}]}}), ReplyError, "sent an invalid chunk: "),
    ],
)
def test_failures_are_one_line(answer, kind, says, monkeypatch):
    monkeypatch.setattr(module, "MAX_RETRIES", 0)
    with replaying(chat=[answer]) as server, opened(server.url) as source:
        with pytest.raises(kind, match=says) as error:
            answered(source)
    assert "\n" not in str(error.value)


def test_half_a_character_is_no_failure():
    with replaying(chat=[streamed(event('{"choices": [{"delta": {"content": "a\\ud83d"}}]}'),
                               chat("b", "stop"))]) as server:  # fmt: skip
        with opened(server.url) as source:
            assert answered(source)[0] == "a?b"


def test_leaving_early_closes_the_connection():
    with replaying(chat=[streamed(chat("a"), None, *[chat("b" * 10**5)] * 200)]) as server:
        with opened(server.url) as source:
            reply = ChatReply()
            with closing(source.stream_reply(TALK, {}, 0, reply)) as parts:
                assert next(parts).text == "a"
            server.on.set()
            assert server.left.wait(10) and reply.finish_reason is None


def test_models_that_are_not_listed():
    answers = body({"data": []}), body([]), body({"data": [{}]}), Answer([b"<html>"])
    for answer in (*answers, refusal(404, "no path")):
        with replaying(models=[answer]) as server:
            with pytest.raises(InputError, match="lists no model"):
                with opened(server.url):
                    pass


def test_what_a_server_cannot_do_is_told_before_anything_is_asked():
    with replaying() as server:
        with pytest.raises(InputError, match="is not a foretoken server.* leave out --gamma"):
            with opened(server.url, gamma=2):
                pass
    bare = body(FACTS | {"chat": False})
    with replaying(speculation=[bare]) as server:
        with pytest.raises(
            InputError, match="--chat-template FILE to the server, .* foretoken chat --raw"
        ):
            with opened(server.url):
                pass
        with opened(server.url, messages=False):
            pass
    for page in (Answer([b"<html>"]), refusal(403, "no"), body({"other": 1})):
        with replaying(speculation=[page]) as server, opened(server.url) as source:
            assert source.facts == {}


def test_a_busy_server_is_asked_again(capsys):
    """When it says so; meanwhile a line tells."""
    with replaying(chat=[refusal(503, "busy", Retry_After="1"), said("a")]) as server:
        with opened(server.url) as source:
            assert answered(source)[0] == "a"
    assert "Retrying" in capsys.readouterr().err


def test_a_server_that_loads_is_asked_again(monkeypatch):
    """When it says so; one that nothing answers for is told at once."""
    monkeypatch.setattr(module, "MAX_RETRIES", 1)  # the client waits longer for each
    loading = refusal(503, "the model is loading", Retry_After="0")
    often = [loading] * (2 * module.MAX_RETRIES)  # as long as it says so
    with replaying(models=[*often, MODELS], speculation=[loading, body(FACTS)]) as server:
        with opened(server.url) as source:
            assert source.name == f"other at {server.url}, d"
    assert [place for place, *_ in server.requests].count("/v1/models") == len(often) + 1
    with replaying(models=[loading, refusal(500, "it broke")]) as server:
        with pytest.raises(ReplyError, match="^it broke$"), opened(server.url):
            pass


def test_ctrl_c_ends_waiting_for_a_server_that_loads(monkeypatch):
    """Which says when to ask again."""

    def pressed(seconds: float) -> None:
        assert seconds == 3
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "sleep", pressed)
    with replaying(models=[refusal(503, "Loading model", Retry_After="3")]) as server:
        with pytest.raises(KeyboardInterrupt), opened(server.url):
            pass


def test_silence_ends(monkeypatch):
    monkeypatch.setattr(module, "MAX_SILENCE_SECONDS", 0.2)
    with replaying(chat=[streamed(chat("a"), None)]) as server, opened(server.url) as source:
        with pytest.raises(ReplyError, match=f"^the connection to {server.url} failed: "):
            answered(source)


def test_objects_only():
    with replaying(speculation=[body({"a": 1}), body([1])]) as server:
        with make_client(f"{server.url}/v1/", "key") as client:
            assert get_address(client) == server.url
            assert [get_json(client, "/speculation") for _ in range(2)] == [{"a": 1}, {}]
    assert server.requests[0][2]["authorization"] == "Bearer key"


@pytest.mark.parametrize(
    ("url", "key", "says"),
    [
        ("localhost:8000", None, "localhost:8000 cannot be reached: "),
        ("ftp://x", None, "ftp://x cannot be reached: "),
        ("http://x:port", None, "url is 'http://x:port': "),
        ("http://127.0.0.1:9", None, "http://127.0.0.1:9 cannot be reached: "),
        ("http://127.0.0.1:9", "a\nb", "HTTP headers cannot hold characters of this API key"),
    ],
)
def test_what_leads_nowhere(url, key, says):
    with pytest.raises(InputError) as error, make_client(url, key) as client:
        get_json(client, "/models")
    assert says in str(error.value) and "\n" not in str(error.value)
