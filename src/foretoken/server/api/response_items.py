"""Items of /v1/responses: converts the items of a conversation to chat messages, and builds the
items and events of a reply as it is generated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from foretoken.errors import format_value
from foretoken.server.api.answers import make_id
from foretoken.server.api.protocol import MAX_CONTENT_PARTS, Content, StrictModel, make_field_error
from foretoken.text.replies.reader import ReplyEvent

ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")


class MessageItem(StrictModel):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: str | None = None
    status: str | None = None
    phase: None = None  # clients send back the phase of an earlier answer


class FunctionCallItem(StrictModel):
    """A function call that the model made earlier in the conversation."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class FunctionCallOutputItem(StrictModel):
    """The result of an earlier function call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    status: str | None = None


class ReasoningPart(StrictModel):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(StrictModel):
    """Reasoning of the model before a message or call."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[ReasoningPart] = Field(
        default_factory=list[ReasoningPart], max_length=MAX_CONTENT_PARTS
    )
    content: list[ReasoningPart] | None = Field(None, max_length=MAX_CONTENT_PARTS)
    encrypted_content: None = None
    status: str | None = None


class UnknownItem(StrictModel):
    """An item of an unsupported type. Such an item is always refused, with an error about the type
    instead of errors about the fields."""

    @model_validator(mode="before")
    @classmethod
    def refuse(cls, item: Any) -> Any:
        kind = item.get("type") if isinstance(item, dict) else None
        raise make_field_error(
            "type", f"the type is {format_value(kind)}; give one of {', '.join(ITEM_TYPES)}"
        )


def _get_item_tag(item: Any) -> str:
    """Return the tag by which pydantic chooses the class of an item. The tags contain a colon so
    that `errors` can leave them out of an error's location."""
    kind = item.get("type", "message") if isinstance(item, dict) else "message"
    return f"item:{kind if kind in ITEM_TYPES else 'unknown'}"


Item = Annotated[
    Annotated[MessageItem, Tag("item:message")]
    | Annotated[FunctionCallItem, Tag("item:function_call")]
    | Annotated[FunctionCallOutputItem, Tag("item:function_call_output")]
    | Annotated[ReasoningItem, Tag("item:reasoning")]
    | Annotated[UnknownItem, Tag("item:unknown")],
    Discriminator(_get_item_tag),
]


def to_messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Convert the items of a conversation to chat messages. A call is added to the preceding
    assistant message; reasoning is added to the next assistant message."""
    turns: list[dict[str, Any]] = []
    thoughts = ""
    for item in items:
        match item:
            case ReasoningItem():
                thoughts += "".join(part.text for part in item.content or ())
                continue
            case MessageItem():
                turns.append(item.model_dump(include={"role", "content"}))
            case FunctionCallItem():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                if turns and turns[-1]["role"] == "assistant" and not thoughts:
                    turns[-1].setdefault("tool_calls", []).append(call)
                    continue
                turns.append({"role": "assistant", "content": "", "tool_calls": [call]})
            case FunctionCallOutputItem():
                result = {"tool_call_id": item.call_id, "content": item.output}
                turns.append({"role": "tool", **result})
            case _:
                raise AssertionError(item)
        if thoughts and turns[-1]["role"] == "assistant":
            turns[-1]["reasoning_content"] = thoughts
        thoughts = ""
    return turns


EventFormatter = Callable[..., str]  # (type, **data) -> server-sent event


@dataclass(slots=True)
class OutputItem:
    """An item of a reply: a message, reasoning or a function call. For a function call, `text`
    holds the call's arguments. `index` is the item's index in the reply."""

    kind: Literal["message", "reasoning", "function_call"]
    index: int
    name: str = ""
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    id: str = ""
    call_id: str = ""

    def __post_init__(self) -> None:
        self.id = make_id({"message": "msg", "reasoning": "rs", "function_call": "fc"}[self.kind])
        self.call_id = make_id("call") if self.kind == "function_call" else ""

    @property
    def location(self) -> dict[str, Any]:
        location: dict[str, Any] = {"item_id": self.id, "output_index": self.index}
        return location if self.kind == "function_call" else location | {"content_index": 0}

    @property
    def part(self) -> dict[str, Any]:
        """Return the only part of the item's `content`."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        more = {"annotations": [], "logprobs": self.logprobs}
        return {"type": "output_text", "text": self.text, **more}

    def to_dict(self, status: str, *, empty: bool = False) -> dict[str, Any]:
        """Return the item as JSON. `empty`: leave out the content, as in the event that announces
        the item."""
        item: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == "function_call":
            return item | {"call_id": self.call_id, "name": self.name, "arguments": self.text}
        content: list[dict[str, Any]] = [] if empty else [self.part]
        more = {"summary": []} if self.kind == "reasoning" else {"role": "assistant"}
        return item | more | {"content": content}

    def begin(self, format_event: EventFormatter) -> Iterator[str]:
        item = self.to_dict("in_progress", empty=True)
        yield format_event("response.output_item.added", output_index=self.index, item=item)
        if self.kind != "function_call":
            yield format_event("response.content_part.added", **self.location, part=self.part)

    def add(
        self, format_event: EventFormatter, text: str, logprobs: list[dict[str, Any]]
    ) -> Iterator[str]:
        self.text += text
        self.logprobs += logprobs
        names = {"message": "output_text", "reasoning": "reasoning_text"}
        name = names.get(self.kind, "function_call_arguments")
        more = {"logprobs": logprobs} if self.kind == "message" else {}
        if text or logprobs:
            yield format_event(f"response.{name}.delta", **self.location, delta=text, **more)

    def end(self, format_event: EventFormatter, status: str) -> Iterator[str]:
        if self.kind == "function_call":
            call = {"name": self.name, "arguments": self.text}
            yield format_event("response.function_call_arguments.done", **self.location, **call)
        else:
            name = "output_text" if self.kind == "message" else "reasoning_text"
            more = {"logprobs": self.logprobs} if self.kind == "message" else {}
            yield format_event(f"response.{name}.done", **self.location, text=self.text, **more)
            yield format_event("response.content_part.done", **self.location, part=self.part)
        item = self.to_dict(status)
        yield format_event("response.output_item.done", output_index=self.index, item=item)


class OutputItems:
    """Builds the items of one reply, and the events of the items, as the reply is generated."""

    def __init__(self, format_event: EventFormatter) -> None:
        self.items: list[OutputItem] = []
        self._format_event = format_event
        self._call: int | None = None
        self._logprobs: list[dict[str, Any]] = []  # of text that is held back

    def add_pieces(self, pieces: list[ReplyEvent], logprobs: list[dict[str, Any]]) -> Iterator[str]:
        """Add new pieces of the reply and yield their events. `logprobs` are sent with the next
        piece of a message; the logprobs of calls are dropped."""
        logprobs, self._logprobs = [*self._logprobs, *logprobs], []
        for piece in pieces:
            kind = "message" if piece.call is None else "function_call"
            kind = "reasoning" if piece.thought else kind
            if not self.items or self.items[-1].kind != kind or piece.call != self._call:
                yield from self._begin(kind, piece)
            text = piece.thought or piece.text or piece.arguments
            item_logprobs, logprobs = (logprobs if kind == "message" else []), []
            yield from self.items[-1].add(self._format_event, text, item_logprobs)
        self._logprobs = logprobs

    def end(self, status: str, *, has_text: bool = True) -> Iterator[str]:
        """End the last item with this status, and yield the item's events. If there are no items,
        add an empty message, unless the reply must have no text (`has_text` is False)."""
        if not self.items and has_text:
            yield from self._begin("message", ReplyEvent())
        if not self.items:
            return
        if self.items[-1].kind == "message":
            yield from self.items[-1].add(self._format_event, "", self._logprobs)
        yield from self.items[-1].end(self._format_event, status)

    def _begin(self, kind: Any, piece: ReplyEvent) -> Iterator[str]:
        if self.items:
            yield from self.items[-1].end(self._format_event, "completed")
        self._call = piece.call
        self.items.append(OutputItem(kind, len(self.items), piece.name))
        yield from self.items[-1].begin(self._format_event)
