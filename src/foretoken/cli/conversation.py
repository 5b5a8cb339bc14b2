"""Messages that go on: what `foretoken chat` keeps, and its commands for them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretoken.cli import files
from foretoken.errors import InputError
from foretoken.storage.files import parse_json, write
from foretoken.text import chat

Message = dict[str, Any]
SYSTEM = ("system", "developer")


@dataclass(slots=True)
class Conversation:
    """Its messages: the system's, if there is one, then user and assistant in turns."""

    messages: list[Message] = field(default_factory=list[Message])

    def asked(self, text: str) -> list[Message]:
        """All of them and the user's next."""
        return [*self.messages, {"role": "user", "content": text}]

    def keep(self, text: str, answer: str) -> None:
        """The user said, and the assistant."""
        self.messages = [*self.asked(text), {"role": "assistant", "content": answer}]

    def system(self, text: str) -> str:
        """Another system's message; "" for none."""
        messages = [{"role": "system", "content": text}] if text else []
        self.messages = [*messages, *self.messages[len(self._head) :]]
        return "the system's message is set" if text else "there is no system's message"

    def reset(self) -> str:
        """Without its turns."""
        self.messages = self._head
        return "the conversation begins anew"

    def undo(self) -> str:
        """Without its last turn; InputError where it has none."""
        users = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if not users:
            raise InputError("there is no turn to take back")
        last = self.messages[users[-1]]
        del self.messages[users[-1] :]
        content = " ".join(str(last["content"]).split())
        return f"taken back: {content[:60]}{'...' * (len(content) > 60)}"

    def save(self, file: str) -> str:
        """All of it into a file; OSError where that cannot be written."""
        path = Path(file).expanduser()
        write(path, json.dumps(self.messages, ensure_ascii=False, indent=1).encode() + b"\n")
        return f"{len(self.messages)} messages are in {path}"

    def load(self, file: str) -> str:
        """Another one from a file; InputError where there is none in it."""
        path = Path(file).expanduser()
        try:
            messages = parse_json(files.text(path, "messages"))
            chat.require(messages)
        except ValueError as error:  # InputError is one
            raise InputError(f"{path} holds no conversation: {error}") from None
        self.messages = [dict(message) for message in messages]
        return f"{len(messages)} messages are from {path}"

    @property
    def _head(self) -> list[Message]:
        return [message for message in self.messages[:1] if message["role"] in SYSTEM]
