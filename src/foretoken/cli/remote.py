"""Answers of an OpenAI-compatible server, as they stream, through the `openai` client.

A server of foretoken's also says what became of every draft token; others send the text alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from json import JSONDecodeError
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any, TypeVar

from foretoken.cli.cluster import needing
from foretoken.cli.sources import ChatReply, Prompt, ReplyPart, ReplyToken, TextError
from foretoken.errors import InputError, one_line, shown
from foretoken.sampling.params import MAX_NEW_TOKENS, OPTIONS, SamplingParams
from foretoken.storage.files import parse_json

if TYPE_CHECKING:
    from httpx2 import URL, Response
    from openai import APIError, OpenAI, Stream

CONNECT, SILENCE = 10.0, 300.0  # seconds until a server must answer, and go on
PATIENCE = 120.0  # seconds that a busy or loading server may ask to wait, in all
WIDEST = 300  # characters of a server's message
# OpenAI's names and, for what these lack, vLLM's
NAMES = {name: each.api.name for name, each in OPTIONS.items() if each.api}
GRAMMARS = {"json_schema": "json", "regex": "regex", "lark": "grammar", "choice": "choice"}
T = TypeVar("T")


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
        return f"{self.model} at {place(self.client)}{f', {draft}' if draft else ''}"

    @property
    def runtime(self) -> str:
        runtime, draft = self.facts.get("runtime"), self.facts.get("draft_runtime")
        return f"{runtime}, draft {draft}" if draft else str(runtime or "")

    @property
    def colours(self) -> bool:
        return bool(self.facts)

    def require(self, options: Mapping[str, Any]) -> None:
        SamplingParams(**options)
        for name in options:
            if name not in NAMES and name != "structured":
                raise InputError(
                    f"{name} has no name in a server's API; leave it out, or run the model in this "
                    "process, without --url"
                )

    def parts(
        self, prompt: Prompt, options: Mapping[str, Any], number: int, reply: ChatReply
    ) -> Generator[ReplyPart]:
        start = perf_counter()
        self.require(options)
        with told(self.client):
            with patient(lambda: self._stream(prompt, options, number)) as stream:
                for chunk in stream:
                    part = _part(chunk, reply)
                    reply.seconds = perf_counter() - start
                    if part.text or part.tokens:
                        yield part
        if reply.finish_reason is None:
            raise TextError("the server broke off before the text's end")

    def _stream(self, prompt: Prompt, options: Mapping[str, Any], number: int) -> Stream[Any]:
        """Send the request; the names that `openai` lacks are in `extra_body`."""
        common: dict[str, Any] = {"model": self.model, "stream": True}
        common["stream_options"] = {"include_usage": True}
        common["extra_body"] = self._options(prompt, options, number)
        if isinstance(prompt, str):
            return self.client.completions.create(prompt=prompt, **common)
        messages: Any = prompt  # `openai` has a type for every role
        return self.client.chat.completions.create(messages=messages, **common)

    def _options(self, prompt: Prompt, options: Mapping[str, Any], number: int) -> dict[str, Any]:
        # Said also where they are left out, so that a command means the same here and there
        always: dict[str, Any] = {"temperature": 0.0}
        always |= {"max_new_tokens": MAX_NEW_TOKENS} if isinstance(prompt, str) else {}
        body = {NAMES[n]: v for n, v in {**always, **options}.items() if n in NAMES}
        if self.seed is not None:
            body["seed"] = (self.seed + number) % 2**63
        if self.facts:
            body["speculation"] = {"steps": True, **self.speculation}
        if self.variables is not None and not isinstance(prompt, str):
            body["chat_template_kwargs"] = self.variables
        return body | _structured(options.get("structured"), chat=not isinstance(prompt, str))


@contextmanager
def remote(
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
    with connected(url, key) as client:
        model = first_model(client) if model is None else model
        facts = facts_of(client)
        if speculation and not facts:
            raise InputError(
                f"{place(client)} is no server of foretoken's, which alone takes options of "
                f"speculation; leave --{next(iter(speculation))} out"
            )
        if messages and facts.get("chat") is False:
            raise InputError(
                f"{model} has no chat template, which makes a prompt of messages; give "
                "--chat-template FILE to the server, or continue plain text: foretoken chat --raw"
            )
        yield RemoteModel(client, model, facts, variables, seed, speculation)


def connected(url: str, key: str | None) -> OpenAI:
    """Return a client of a server. InputError for an invalid address or key."""
    base = _address(url)
    if key is not None and not (key.isascii() and key.isprintable()):
        raise InputError("the API key holds characters that no header can; give it as it was made")
    with needing("client"):
        from openai import DefaultHttpxClient, OpenAI  # late: it takes a second
    import httpx2

    timeout = httpx2.Timeout(SILENCE, connect=CONNECT)
    # A redirect would send the key to another server
    http = DefaultHttpxClient(timeout=timeout, follow_redirects=False)
    url = f"{str(base).rstrip('/')}/v1"
    key = key or "none"  # the client wants one
    return OpenAI(base_url=url, api_key=key, http_client=http, max_retries=0)


def _address(url: str) -> URL:
    import httpx2  # late: `--help` does without it

    try:
        base = httpx2.URL(url.strip().rstrip("/").removesuffix("/v1"))
    except httpx2.InvalidURL as error:
        raise InputError(f"url is {shown(url)}: {one_line(error)}") from None
    if base.scheme not in ("http", "https") or not base.host:
        raise InputError(f"url is {shown(url)}; give one such as http://127.0.0.1:8000")
    return base


def place(client: OpenAI) -> str:
    """Return the server's address, as messages have it."""
    return str(client.base_url).rstrip("/").removesuffix("/v1")


def first_model(client: OpenAI) -> str:
    try:
        return str(get(client, "/models")["data"][0]["id"])
    except RejectedError as error:
        detail = f": {error}"
    except (IndexError, KeyError, TypeError):
        detail = ""
    raise InputError(f"{place(client)} lists no model; give --model{detail}")


def facts_of(client: OpenAI) -> dict[str, Any]:
    """Return what a server of ours tells of itself; {} for another's."""
    try:
        facts = get(client, "/speculation")
    except RejectedError:
        return {}
    return facts if "target" in facts else {}


def get(client: OpenAI, path: str) -> dict[str, Any]:
    """Return the JSON object there, {} where there is none."""
    import httpx2

    with told(client):
        response = patient(lambda: client.get(path, cast_to=httpx2.Response))
    try:
        read = parse_json(response.content)
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}


class RejectedError(InputError):
    """A request that the server does not take."""


def patient(ask: Callable[[], T]) -> T:
    """Ask; where the server says when to come again, wait for that and ask again."""
    from openai import APIStatusError

    patience = PATIENCE
    while True:
        try:
            return ask()
        except APIStatusError as error:
            after = _after(error.response.headers.get("retry-after", ""))
            if error.status_code not in (429, 503) or after is None or after > patience:
                raise
            said = message(error.response)
        print(f"{said}; again in {after:g} s", file=sys.stderr)
        sleep(after)
        patience -= after


@contextmanager
def told(client: OpenAI) -> Generator[None]:
    """Raise the client's errors in one line: InputError for what the user can mend, TextError for
    a server that fails."""
    from openai import APIError

    try:
        yield
    except APIError as error:
        raise _error(error, place(client)) from None
    except UnicodeEncodeError:  # a part of the command line that is no text
        raise InputError("the request is not valid text; give text in UTF-8") from None
    except (JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TextError(f"the server sent no JSON: {one_line(error)}") from None


def _error(error: APIError, server: str) -> Exception:
    import httpx2
    from openai import APIConnectionError, APIStatusError, APITimeoutError

    if isinstance(error, APIStatusError):
        return _refused(error.status_code, message(error.response))
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    if isinstance(cause, httpx2.ConnectTimeout):
        return InputError(f"{server} does not answer within {CONNECT:g} s")
    if isinstance(cause, httpx2.ConnectError):
        return InputError(f"{server} cannot be reached: {one_line(cause)}")
    if isinstance(error, APITimeoutError):
        return TextError(f"{server} said nothing for {SILENCE:g} s")
    if isinstance(error, APIConnectionError):
        return TextError(f"{server} broke off: {one_line(cause)}")
    return TextError(_detail(error.body) or "the server failed")  # said within a stream


def _refused(status: int, reason: str) -> Exception:
    if status == 401:
        return InputError(f"{reason}; give --api-key, or FORETOKEN_API_KEY in the environment")
    return RejectedError(reason) if status < 500 and status != 429 else TextError(reason)


def message(response: Response) -> str:
    """Return the message in the body of an error, or else its status."""
    status = f"the server answers {response.status_code} {response.reason_phrase}".rstrip()
    try:
        error = parse_json(response.content)["error"]
    except (ValueError, KeyError, TypeError):
        return status
    return _detail(error) or status


def _detail(error: object) -> str:
    """Return a server's words in one line."""
    detail = error.get("message") if isinstance(error, dict) else error
    text = "".join(c if c.isprintable() else " " for c in str(detail or ""))
    return " ".join(text.split())[:WIDEST].rstrip(".")


def _after(header: str) -> float | None:
    """Return the seconds of a Retry-After, at least one; None where there is none."""
    if header.strip().isdigit():
        return max(1.0, float(header))
    try:
        at = parsedate_to_datetime(header)
    except ValueError:
        return None
    return max(1.0, (at - datetime.now(UTC)).total_seconds()) if at.tzinfo else None


def _part(chunk: Any, reply: ChatReply) -> ReplyPart:
    """Return what a chunk adds. TextError for one that is not as it should be."""
    try:
        text = "".join(_text(choice, reply) for choice in chunk.choices or ())
        if chunk.usage:
            reply.tokens = int(chunk.usage.completion_tokens)
        steps = ((chunk.model_extra or {}).get("speculation") or {}).get("steps") or []
        tokens = [token for step in steps for token in _step(step, reply)]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise TextError(f"the server sent {shown(chunk)}, which is no chunk") from None
    return ReplyPart(text, tokens)


def _text(choice: Any, reply: ChatReply) -> str:
    """Return the text that a choice adds, of a message or of a completion."""
    reply.finish_reason = choice.finish_reason or reply.finish_reason
    text = choice.delta.content if hasattr(choice, "delta") else choice.text
    return (text or "").encode("utf-8", "replace").decode()  # JSON may hold half a character


def _step(step: dict[str, Any], reply: ChatReply) -> list[ReplyToken]:
    tokens = [ReplyToken(str(each["text"]), str(each["source"])) for each in step["tokens"]]
    accepted = sum(token.fate == "accepted" for token in tokens)
    reply.tokens += len(tokens)
    reply.calls += 1
    reply.accepted += accepted
    reply.drafted += accepted + len(step["rejected"])
    reply.overlaps += [float(overlap) for overlap in step["overlaps"]]
    return tokens


def _structured(structure: Mapping[str, Any] | None, *, chat: bool) -> dict[str, Any]:
    """Return what a text must match: a schema in OpenAI's form, where it has one."""
    if not structure:
        return {}
    ((kind, value),) = structure.items()
    if chat and kind == "json_schema":
        schema = {"name": "answer", "schema": value, "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    return {"structured_outputs": {GRAMMARS[kind]: value}}
