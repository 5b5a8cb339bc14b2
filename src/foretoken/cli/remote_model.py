"""Gets the replies of `foretoken chat` from a server, with the `openai` package (an extra).

A foretoken server also reports which draft tokens were accepted; other servers send only the text.
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
CONNECT_SECONDS, MAX_SILENCE_SECONDS = 10.0, 300.0  # timeouts for connecting and for reading
MAX_RETRIES = 12  # if a server is busy, loading or failing; `openai` respects Retry-After
MAX_PAUSE_SECONDS = 5.0  # between requests to a server that is loading its model
MAX_MESSAGE_CHARS = 300  # of a server's error message
# OpenAI's names of options; vLLM's names for options that OpenAI's API lacks
API_NAMES = {name: each.api.name for name, each in SAMPLING_OPTIONS.items() if each.api}
API_GRAMMAR_NAMES = {"json_schema": "json", "regex": "regex", "lark": "grammar", "choice": "choice"}


class RejectedError(InputError):
    """The server rejected a request, with a status such as 400 or 404."""


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """Source of chat replies: a server and one of its models."""

    client: OpenAI
    model: str
    facts: Mapping[str, Any]  # a foretoken server's answer to GET /v1/speculation; {}: other server
    variables: Mapping[str, Any] | None = None  # for the server's chat template
    seed: int | None = None
    speculation: Mapping[str, Any] = field(default_factory=dict[str, Any])  # field of requests

    @property
    def name(self) -> str:
        draft = self.facts.get("draft")
        return f"{self.model} at {get_address(self.client)}{f', {draft}' if draft else ''}"

    def get_default_options(self, *, messages: bool) -> dict[str, Any]:
        """Return the default sampling options of a reply. In a conversation (`messages`), the
        server also applies its model's generation config; if a foretoken server reports that this
        config has no temperature, the default is greedy, as in a local chat."""
        if not messages:
            return {"temperature": 0.0, "max_new_tokens": MAX_NEW_TOKENS}
        greedy = self.facts and self.facts.get("temperature") is None
        return {**({"temperature": 0.0} if greedy else {}), "max_new_tokens": DEFAULT_ANSWER_TOKENS}

    def get_plain_seconds(self, options: Mapping[str, Any]) -> None:
        """Return None, as a server does not report the time of plain decoding."""

    def require(self, options: Mapping[str, Any]) -> None:
        """Raise InputError for sampling options that do not exist in a server's API."""
        SamplingParams(**options)
        for name in options:
            if name not in API_NAMES and name != "structured":
                raise InputError(
                    f"{name} does not exist in a server's API; leave it out, or run the model in "
                    "this process, without --url"
                )

    def stream_reply(
        self, prompt: ChatPrompt, options: Mapping[str, Any], number: int, reply: ChatReply
    ) -> Generator[ReplyPart]:
        """Yield the reply to a prompt in parts, like `LocalModel.stream_reply`. The default limit
        of new tokens is applied here and not sent, as a server rejects a limit that exceeds the
        context length."""
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
            raise ReplyError("the server closed the stream before the reply was complete")

    def _send_request(self, prompt: ChatPrompt, options: Mapping[str, Any], number: int) -> Any:
        """Send the request and return its stream of chunks. `extra_body` holds the fields that
        `openai` does not support."""
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
        # Send the defaults too, so that a command has the same effect with and without --url
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
    """Connect to a server and yield a RemoteModel. Query the server's capabilities first, so that
    errors are reported early.

    Args:
        url: Address of the server, with or without /v1.
        key: API key; None: the server needs no key.
        model: Name of the model; None: the first that the server lists.
        variables: Variables for the server's chat template.
        messages: True if prompts are conversations.
        seed: Seed of the replies; None: the server chooses.
        speculation: Speculation options of each request, for a foretoken server only.

    Raises:
        InputError: The server cannot be reached or does not support these options.
    """
    with make_client(url, key) as client:
        model = get_first_model(client) if model is None else model
        facts = get_json(client, "/speculation")
        facts = facts if "target" in facts else {}  # other servers may have such a path too
        if speculation and not facts:
            raise InputError(
                f"{get_address(client)} is not a foretoken server, so it takes no options of "
                f"speculation; leave out --{next(iter(speculation))}"
            )
        if messages and facts.get("chat") is False:
            raise InputError(
                f"{model} has no chat template to make a prompt from messages; give "
                "--chat-template FILE to the server, or continue plain text: foretoken chat --raw"
            )
        yield RemoteModel(client, model, facts, variables, seed, speculation)


def make_client(url: str, key: str | None) -> OpenAI:
    """Return an `openai` client for a server. Raises InputError for an invalid address or API
    key."""
    if key is not None and not (key.isascii() and key.isprintable()):
        raise InputError("HTTP headers cannot hold characters of this API key; give another key")
    client_log = logging.getLogger("openai._base_client")  # logs its retries
    client_log.setLevel(logging.INFO)
    client_log.handlers = [StderrLines()]
    # Following a redirect would send the API key to another server
    http = DefaultHttpxClient(
        timeout=httpx2.Timeout(MAX_SILENCE_SECONDS, connect=CONNECT_SECONDS), follow_redirects=False
    )
    base = f"{url.strip().rstrip('/').removesuffix('/v1')}/v1"
    try:
        return OpenAI(base_url=base, api_key=key or "none", http_client=http, max_retries=0)
    except httpx2.InvalidURL as error:
        raise InputError(f"url is {format_value(url)}: {to_one_line(error)}") from None


def get_address(client: OpenAI) -> str:
    """Return the server's address for messages, without `/v1`."""
    return str(client.base_url).rstrip("/").removesuffix("/v1")


def get_first_model(client: OpenAI) -> str:
    try:
        return str(get_json(client, "/models")["data"][0]["id"])
    except (IndexError, KeyError, TypeError):
        raise InputError(f"{get_address(client)} lists no models; give --model") from None


def get_json(client: OpenAI, path: str) -> dict[str, Any]:
    """Return the JSON object at a path of the server; {} if the server rejects the request or sends
    no JSON object. Retry while the server is loading its model."""
    try:
        with translate_errors(client):
            try:
                answer = _retry_while_loading(lambda: client.get(path, cast_to=object))
            except InternalServerError:  # a connection error is not retried
                answer = client.with_options(max_retries=MAX_RETRIES).get(path, cast_to=object)
    except RejectedError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _retry_while_loading(ask: Callable[[], Any]) -> Any:
    """Call `ask` and return its result. Repeat the call while the server answers that it is loading
    its model."""

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
    """Context manager that converts errors of `openai` to errors with a message of one line:
    InputError for mistakes of the user, ReplyError for failures of the server."""
    try:
        yield
    except APIError as error:
        raise _make_error(error, get_address(client)) from None
    except UnicodeEncodeError:  # bytes of the command line that are not UTF-8
        raise InputError("the request is not valid text; give text in UTF-8") from None
    except (ValueError, RecursionError) as error:  # from parsing JSON
        raise ReplyError(f"the server sent invalid JSON: {to_one_line(error)}") from None


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
        return ReplyError(f"the connection to {server} failed: {to_one_line(cause)}")
    return ReplyError(reason)  # an error event within a stream


def _parse_chunk(chunk: Any, reply: ChatReply) -> ReplyPart:
    """Return the part of the reply in a chunk, and update the counts in `reply`. Raises ReplyError
    for an invalid chunk."""
    try:
        text = "".join(_parse_text(choice, reply) for choice in chunk.choices or ())
        if chunk.usage:
            reply.tokens = int(chunk.usage.completion_tokens)
        steps = ((chunk.model_extra or {}).get("speculation") or {}).get("steps") or []
        tokens = [token for step in steps for token in _parse_step(step, reply)]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ReplyError(f"the server sent an invalid chunk: {format_value(chunk)}") from None
    return ReplyPart(text, tokens)


def _parse_text(choice: Any, reply: ChatReply) -> str:
    """Return the new text in a choice of a chat completion or a completion, and update the finish
    reason of `reply`."""
    reply.finish_reason = choice.finish_reason or reply.finish_reason
    text = choice.delta.content if hasattr(choice, "delta") else choice.text
    return (text or "").encode("utf-8", "replace").decode()  # JSON may hold lone surrogates


def _parse_step(step: dict[str, Any], reply: ChatReply) -> list[ReplyToken]:
    tokens = [ReplyToken(str(each["text"]), str(each["source"])) for each in step["tokens"]]
    reply.tokens += len(tokens)
    reply.num_forwards += 1
    reply.overlaps += [float(overlap) for overlap in step["overlaps"]]
    return tokens


def _make_structure(structure: Mapping[str, Any] | None, *, chat: bool) -> dict[str, Any]:
    """Return the fields of a request for the sampling option `structured`: OpenAI's
    `response_format` for a JSON schema in a chat, otherwise vLLM's `structured_outputs`."""
    if not structure:
        return {}
    ((kind, value),) = structure.items()
    if chat and kind == "json_schema":
        schema = {"name": "answer", "schema": value, "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    return {"structured_outputs": {API_GRAMMAR_NAMES[kind]: value}}
