"""Answers for `foretoken chat` by a model of a server, through the `openai` client, an extra.

A server of foretoken's also says what became of every draft token; others send the text alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import sleep
from typing import Any

import httpx2
from openai import (
    APIConnectionError,
    APIError,
    APIStatusError,
    DefaultHttpxClient,
    InternalServerError,
    OpenAI,
)

from foretoken.cli.command import StderrLines
from foretoken.cli.option import DEFAULT_ANSWER_TOKENS
from foretoken.cli.reply import ChatPrompt, ChatReply, ReplyError, ReplyPart, ReplyToken
from foretoken.errors import InputError, format_value, to_one_line
from foretoken.sampling.params import MAX_NEW_TOKENS, SAMPLING_OPTIONS, SamplingParams
from foretoken.slow_log import log_if_slow

log = logging.getLogger(__name__)
CONNECT_SECONDS, MAX_SILENCE_SECONDS = 10.0, 300.0  # seconds until a server must answer, and go on
MAX_RETRIES = 12  # where a server is busy, loading or broken; it may say when to come again
MAX_PAUSE_SECONDS = 5.0  # seconds between questions to a server that loads, at most
MAX_MESSAGE_CHARS = 300  # characters of a server's message
# OpenAI's names and, for what these lack, vLLM's
API_NAMES = {name: each.api.name for name, each in SAMPLING_OPTIONS.items() if each.api}
API_GRAMMAR_NAMES = {"json_schema": "json", "regex": "regex", "lark": "grammar", "choice": "choice"}


class RejectedError(InputError):
    """A request that the server does not take."""


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A server and one of its models. facts: a foretoken server's own description; {} of others."""

    client: OpenAI
    model: str
    facts: Mapping[str, Any]
    variables: Mapping[str, Any] | None = None  # of its chat template
    seed: int | None = None
    speculation: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def name(self) -> str:
        draft = self.facts.get("draft")
        return f"{self.model} at {get_address(self.client)}{f', {draft}' if draft else ''}"

    def get_default_options(self, *, messages: bool) -> dict[str, Any]:
        """Return the options of texts for which none are given. A server samples answers as its
        model's generation config asks for; one of ours says where that asks for nothing."""
        if not messages:
            return {"temperature": 0.0, "max_new_tokens": MAX_NEW_TOKENS}
        greedy = self.facts and self.facts.get("temperature") is None
        return {**({"temperature": 0.0} if greedy else {}), "max_new_tokens": DEFAULT_ANSWER_TOKENS}

    def get_plain_seconds(self, options: Mapping[str, Any]) -> None:
        """Return None: a server does not tell."""

    def require(self, options: Mapping[str, Any]) -> None:
        """Raise InputError for options that a request has no name for."""
        SamplingParams(**options)
        for name in options:
            if name not in API_NAMES and name != "structured":
                raise InputError(
                    f"{name} has no name in a server's API; leave it out, or run the model in this "
                    "process, without --url"
                )

    def stream_reply(
        self, prompt: ChatPrompt, options: Mapping[str, Any], number: int, reply: ChatReply
    ) -> Generator[ReplyPart]:
        """Answer a prompt part by part, as a `LocalModel` does. The default limit of an answer is
        kept here, as a server refuses one that the context has no room for."""
        self.require(options)
        limit = (
            None
            if isinstance(prompt, str) or "max_new_tokens" in options
            else DEFAULT_ANSWER_TOKENS
        )
        chunks = 0
        with translate_errors(self.client), self._send_request(prompt, options, number) as stream:
            for chunk in stream:
                part = _parse_chunk(chunk, reply)
                if part.text or part.tokens:
                    chunks += 1
                    yield part
                if limit and reply.finish_reason is None and max(reply.tokens, chunks) >= limit:
                    reply.tokens, reply.finish_reason = max(reply.tokens, chunks), "length"
                    return
        if reply.finish_reason is None:
            raise ReplyError("the server broke off before the text's end")

    def _send_request(self, prompt: ChatPrompt, options: Mapping[str, Any], number: int) -> Any:
        """Send the request; the names that `openai` lacks are in `extra_body`."""
        client = self.client.with_options(max_retries=MAX_RETRIES)
        common: dict[str, Any] = {"model": self.model, "stream": True}
        common["stream_options"] = {"include_usage": True}
        common["extra_body"] = self._make_body(prompt, options, number)
        if isinstance(prompt, str):
            return _retry_while_loading(lambda: client.completions.create(prompt=prompt, **common))
        messages: Any = prompt  # `openai` has a type for every role
        return _retry_while_loading(
            lambda: client.chat.completions.create(messages=messages, **common)
        )

    def _make_body(
        self, prompt: ChatPrompt, options: Mapping[str, Any], number: int
    ) -> dict[str, Any]:
        messages = not isinstance(prompt, str)
        # Sent also where they are left out, so that a command means the same here and there
        always = self.get_default_options(messages=messages)
        if messages:
            del always["max_new_tokens"]
        body = {API_NAMES[n]: v for n, v in {**always, **options}.items() if n in API_NAMES}
        if self.seed is not None:
            body["seed"] = (self.seed + number) % 2**63
        if self.facts:
            body["speculation"] = {"steps": True, **self.speculation}
        if self.variables is not None and not isinstance(prompt, str):
            body["chat_template_kwargs"] = self.variables
        return body | _make_structure(options.get("structured"), chat=messages)


@contextmanager
def open_remote_model(
    url: str,
    key: str | None,
    model: str | None,
    variables: Mapping[str, Any] | None,
    *,
    messages: bool,
    seed: int | None,
    speculation: Mapping[str, Any],
) -> Iterator[RemoteModel]:
    """Open a server as a source, asking first what it is, so that mistakes are told early.

    model: None for the first that the server lists. variables: of its chat template. messages:
    prompts are conversations. speculation: options of ours for each request. Raises InputError for
    what the server does not have, and where it cannot be reached.
    """
    with make_client(url, key) as client:
        model = get_first_model(client) if model is None else model
        facts = get_json(client, "/speculation")
        facts = facts if "target" in facts else {}  # another's server may have such a page, too
        if speculation and not facts:
            raise InputError(
                f"{get_address(client)} is no server of foretoken's, which alone takes options of "
                f"speculation; leave --{next(iter(speculation))} out"
            )
        if messages and facts.get("chat") is False:
            raise InputError(
                f"{model} has no chat template, which makes a prompt of messages; give "
                "--chat-template FILE to the server, or continue plain text: foretoken chat --raw"
            )
        yield RemoteModel(client, model, facts, variables, seed, speculation)


def make_client(url: str, key: str | None) -> OpenAI:
    """Return a client of a server. InputError for an invalid address or key."""
    if key is not None and not (key.isascii() and key.isprintable()):
        raise InputError("the API key holds characters that no header can; give it as it was made")
    client_log = logging.getLogger("openai._base_client")  # it says when it asks again
    client_log.setLevel(logging.INFO)
    client_log.handlers = [StderrLines()]
    # A redirect would send the key to another server
    http = DefaultHttpxClient(
        timeout=httpx2.Timeout(MAX_SILENCE_SECONDS, connect=CONNECT_SECONDS), follow_redirects=False
    )
    base = f"{url.strip().rstrip('/').removesuffix('/v1')}/v1"
    try:
        return OpenAI(base_url=base, api_key=key or "none", http_client=http, max_retries=0)
    except httpx2.InvalidURL as error:
        raise InputError(f"url is {format_value(url)}: {to_one_line(error)}") from None


def get_address(client: OpenAI) -> str:
    """Return the server's address, as messages have it."""
    return str(client.base_url).rstrip("/").removesuffix("/v1")


def get_first_model(client: OpenAI) -> str:
    try:
        return str(get_json(client, "/models")["data"][0]["id"])
    except (IndexError, KeyError, TypeError):
        raise InputError(f"{get_address(client)} lists no model; give --model") from None


def get_json(client: OpenAI, path: str) -> dict[str, Any]:
    """Return the JSON object there, {} where there is none; ask again while the server loads."""
    try:
        with translate_errors(client):
            try:
                answer = _retry_while_loading(lambda: client.get(path, cast_to=object))
            except InternalServerError:  # where nothing answers, that is told at once
                answer = client.with_options(max_retries=MAX_RETRIES).get(path, cast_to=object)
    except RejectedError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _retry_while_loading(ask: Callable[[], Any]) -> Any:
    """Return what a server answers, asking again as long as it says that its model is loading."""

    def try_once() -> list[Any]:
        nonlocal pause
        try:
            return [ask()]
        except InternalServerError as error:
            if error.status_code != 503 or "loading" not in str(error.body).lower():
                raise
            after = error.response.headers.get("retry-after", "")
            pause = min(MAX_PAUSE_SECONDS, int(after)) if after.isdecimal() else MAX_PAUSE_SECONDS
            return []

    pause = MAX_PAUSE_SECONDS
    if answers := try_once():
        return answers[0]
    with log_if_slow(log, "waiting for the server, which is loading its model"):
        while not answers:
            sleep(pause)
            answers = try_once()
    return answers[0]


@contextmanager
def translate_errors(client: OpenAI) -> Generator[None]:
    """Raise the client's errors in one line: InputError for what the user can mend, TextError for
    a server that fails."""
    try:
        yield
    except APIError as error:
        raise _make_error(error, get_address(client)) from None
    except UnicodeEncodeError:  # a part of the command line that is no text
        raise InputError("the request is not valid text; give text in UTF-8") from None
    except (ValueError, RecursionError) as error:  # of its JSON
        raise ReplyError(f"the server sent no JSON: {to_one_line(error)}") from None


def _make_error(error: APIError, server: str) -> Exception:
    body = error.body
    message = str((body.get("message") if isinstance(body, dict) else body) or "")
    printable = "".join(each if each.isprintable() else " " for each in message)
    reason = " ".join(printable.split())[:MAX_MESSAGE_CHARS].rstrip(".")
    if isinstance(error, APIStatusError):
        status, answer = error.status_code, error.response
        if not isinstance(body, dict) or not reason:
            reason = f"the server answers {status} {answer.reason_phrase}"
        if status == 401:
            return InputError(f"{reason}; give --api-key, or FORETOKEN_API_KEY in the environment")
        return RejectedError(reason) if status < 500 and status != 429 else ReplyError(reason)
    if isinstance(error, APIConnectionError):
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        if isinstance(
            cause, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.UnsupportedProtocol
        ):
            return InputError(f"{server} cannot be reached: {to_one_line(cause)}")
        return ReplyError(f"{server} broke off: {to_one_line(cause)}")
    return ReplyError(reason)  # said within a stream


def _parse_chunk(chunk: Any, reply: ChatReply) -> ReplyPart:
    """Return what a chunk adds. TextError for one that is not as it should be."""
    try:
        text = "".join(_parse_text(choice, reply) for choice in chunk.choices or ())
        if chunk.usage:
            reply.tokens = int(chunk.usage.completion_tokens)
        steps = ((chunk.model_extra or {}).get("speculation") or {}).get("steps") or []
        tokens = [token for step in steps for token in _parse_step(step, reply)]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ReplyError(f"the server sent {format_value(chunk)}, which is no chunk") from None
    return ReplyPart(text, tokens)


def _parse_text(choice: Any, reply: ChatReply) -> str:
    """Return the text that a choice adds, of a message or of a completion."""
    reply.finish_reason = choice.finish_reason or reply.finish_reason
    text = choice.delta.content if hasattr(choice, "delta") else choice.text
    return (text or "").encode("utf-8", "replace").decode()  # JSON may hold half a character


def _parse_step(step: dict[str, Any], reply: ChatReply) -> list[ReplyToken]:
    tokens = [ReplyToken(str(each["text"]), str(each["source"])) for each in step["tokens"]]
    reply.tokens += len(tokens)
    reply.num_forwards += 1
    reply.overlaps += [float(overlap) for overlap in step["overlaps"]]
    return tokens


def _make_structure(structure: Mapping[str, Any] | None, *, chat: bool) -> dict[str, Any]:
    """Return what a text must match: a schema in OpenAI's form, where it has one."""
    if not structure:
        return {}
    ((kind, value),) = structure.items()
    if chat and kind == "json_schema":
        schema = {"name": "answer", "schema": value, "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    return {"structured_outputs": {API_GRAMMAR_NAMES[kind]: value}}
