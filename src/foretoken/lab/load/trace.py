"""What one request brings, as its client sees it: read from the chunks of a completion that
streams. Tokens are the server's own count; its chunks are no tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any


@dataclass(slots=True)
class Trace:
    """Times are in seconds since the request was sent."""

    arrivals: list[float] = field(default_factory=list[float])  # of chunks with text or tokens
    counts: list[int | None] = field(default_factory=list[int | None])  # their tokens, where told
    end: float = 0.0  # of the last chunk of the text
    finish_reason: str | None = None
    prompt_tokens: int = 0
    tokens: int | None = None  # None until the usage tells
    failure: tuple[str, str] | None = None  # a status or what else failed, and a message
    late: float = 0.0  # how long after it was due the request was sent

    def read(self, chunk: dict[str, Any], seconds: float) -> None:
        """The next chunk, and when it came. ValueError for one that is not as it should be."""
        try:
            for choice in chunk.get("choices") or []:
                self._read(choice["text"], choice.get("token_ids"), seconds)
                self.finish_reason = choice.get("finish_reason") or self.finish_reason
            if usage := chunk.get("usage"):
                self.prompt_tokens = int(usage["prompt_tokens"])
                self.tokens = int(usage["completion_tokens"])
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ValueError("a chunk is not as OpenAI's are") from None

    def _read(self, text: str, ids: list[int] | None, seconds: float) -> None:
        self.end = seconds
        if ids or (ids is None and text):
            self.arrivals.append(seconds)
            self.counts.append(None if ids is None else len(ids))

    def close(self) -> None:
        """The stream is over: a failure, unless all is there."""
        count = self.tokens
        if self.finish_reason is None:
            self.failure = "stream", "the server broke off before the text's end"
        elif count is None:
            self.failure = "stream", "the server told no usage, so tokens cannot be counted"
        elif self.counted and sum(self._known) != count:
            tokens = sum(self._known)
            self.failure = "stream", f"{tokens} tokens came in chunks, {count} stand in the usage"

    @property
    def counted(self) -> bool:
        """Whether every chunk says how many tokens it holds."""
        return None not in self.counts and bool(self.counts)

    @property
    def _known(self) -> list[int]:
        return [count for count in self.counts if count is not None]

    @property
    def ttft(self) -> float | None:
        """Until the first token; None of a text without one."""
        return self.arrivals[0] if self.arrivals else None

    @property
    def tpot(self) -> float | None:
        """A token, without the first; None where there is no other."""
        if self.ttft is None or not self.tokens or self.tokens < 2:
            return None
        return (self.end - self.ttft) / (self.tokens - 1)

    def gaps(self, *, counted: bool) -> list[float]:
        """Between tokens: a chunk of k is k gaps of a k-th each, as its tokens came together; or
        else between chunks. Tokens that came with the first one waited for nothing of their own."""
        between = [late - early for early, late in pairwise(self.arrivals)]
        if not counted:
            return between
        return [gap / k for gap, k in zip(between, self._known[1:], strict=True) for _ in range(k)]
