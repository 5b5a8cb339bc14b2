"""Answers from an OpenAI-compatible server, as they stream. Of ours also what became of every
guess; of others the text alone."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from foretoken.cli.connection import RejectedError, answered, chunks, connected, get, place
from foretoken.cli.sources import ChatReply, Prompt, ReplyPart, ReplyToken, TextError
from foretoken.errors import InputError, shown
from foretoken.sampling.params import MAX_NEW_TOKENS, OPTIONS, SamplingParams

if TYPE_CHECKING:
    from httpx2 import Client

# OpenAI's names and, for what these lack, vLLM's
NAMES = {name: each.api.name for name, each in OPTIONS.items() if each.api}
GRAMMARS = {"json_schema": "json", "regex": "regex", "lark": "grammar", "choice": "choice"}


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A server and one of its models. `facts`: what ours tells of itself; {} of others."""

    client: Client
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
        where = "completions" if isinstance(prompt, str) else "chat/completions"
        body = self._body(prompt, options, number)
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # a part of the command line that is no text
            raise InputError("the request is not valid text; give text in UTF-8") from None
        with answered(self.client, "POST", f"/v1/{where}", body) as response:
            for chunk in chunks(response):
                part = _part(chunk, reply)
                reply.seconds = perf_counter() - start
                if part.text or part.tokens:
                    yield part
        if reply.finish_reason is None:
            raise TextError("the server broke off before the text's end")

    def _body(self, prompt: Prompt, options: Mapping[str, Any], number: int) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "stream": True}
        body["stream_options"] = {"include_usage": True}
        # Said also where they are left out, so that a command means the same here and there
        always: dict[str, Any] = {"temperature": 0.0}
        always |= {"max_new_tokens": MAX_NEW_TOKENS} if isinstance(prompt, str) else {}
        body |= {NAMES[n]: v for n, v in {**always, **options}.items() if n in NAMES}
        if self.seed is not None:
            body["seed"] = (self.seed + number) % 2**63
        if self.facts:
            body["speculation"] = {"steps": True, **self.speculation}
        body |= _structured(options.get("structured"), chat=not isinstance(prompt, str))
        if isinstance(prompt, str):
            return body | {"prompt": prompt}
        if self.variables is not None:
            body["chat_template_kwargs"] = self.variables
        return body | {"messages": prompt}


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
    """A server as a source: asked what it is, so that mistakes are told before anything else.

    `model`: None for the first that it lists. `variables`: of its chat template. `messages`:
    whether prompts are conversations. `speculation`: how requests are to be guessed for, as ours
    takes it. InputError for what the server does not have, and where it cannot be reached.
    """
    with connected(url, key) as client:
        model = first_model(client) if model is None else model
        facts = facts_of(client)
        if speculation and not facts:
            raise InputError(
                f"{place(client)} is no server of foretoken's, so nothing can be said of its "
                f"guesses; leave --{next(iter(speculation))} out"
            )
        if messages and facts.get("chat") is False:
            raise InputError(
                f"{model} has no chat template, which makes a prompt of messages; give "
                "--chat-template FILE to the server, or continue plain text: foretoken chat --raw"
            )
        yield RemoteModel(client, model, facts, variables, seed, speculation)


def first_model(client: Client) -> str:
    try:
        names = [str(model["id"]) for model in get(client, "/v1/models")["data"]]
        return names[0]
    except RejectedError as error:
        detail = f": {error}"
    except (IndexError, KeyError, TypeError):
        detail = ""
    raise InputError(f"{place(client)} lists no model; give --model{detail}")


def facts_of(client: Client) -> dict[str, Any]:
    """What a server of ours tells of itself; {} for another's."""
    try:
        facts = get(client, "/v1/speculation")
    except RejectedError:
        return {}
    return facts if "target" in facts else {}


def _part(chunk: dict[str, Any], reply: ChatReply) -> ReplyPart:
    """What a chunk adds. TextError for one that is not as it should be."""
    try:
        text = "".join(_text(choice, reply) for choice in chunk.get("choices") or [])
        if usage := chunk.get("usage"):
            reply.tokens = int(usage["completion_tokens"])
        steps = (chunk.get("speculation") or {}).get("steps") or []
        tokens = [token for step in steps for token in _step(step, reply)]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise TextError(f"the server sent {shown(chunk)}, which is no chunk") from None
    return ReplyPart(text, tokens)


def _text(choice: dict[str, Any], reply: ChatReply) -> str:
    """What a choice goes on by."""
    reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
    text = choice["delta"].get("content") if "delta" in choice else choice["text"]
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
    """What a text must match: a schema as OpenAI has it, where it has it."""
    if not structure:
        return {}
    ((kind, value),) = structure.items()
    if chat and kind == "json_schema":
        schema = {"name": "answer", "schema": value, "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    return {"structured_outputs": {GRAMMARS[kind]: value}}
