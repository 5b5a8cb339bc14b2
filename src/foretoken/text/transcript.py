"""A row's new tokens as text: where a stop string ends it, and what may be shown already.

Knows no models and no rows: tokens come one after the other. Which tokens end a row by their id is
not known here; such a token is not read, the text is closed instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from foretoken.text.decoding import REPLACEMENT, Stream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Transcript:
    """The text that new tokens add to a prompt's, up to the first of the stop strings.

    The text ends with the first token at which what has been read, decoded as if nothing followed,
    holds a stop string: replacement characters at its very end, which the next token may complete,
    count only when the text is closed. Of several stop strings in it the one that begins first is
    meant, of two that begin together the shorter, which was complete first. What stands before the
    new tokens takes no part. So the result is a function of the tokens, not of the steps in which
    they came.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int],
        stop_strings: Sequence[str] = (),
        *,
        include: bool = False,
    ) -> None:
        """`include`: whether the stop string is part of the text, which otherwise ends before it.
        With stop strings every token is decoded as it is read, else when the text is asked for."""
        assert all(stop_strings), "an empty string ends every text"
        self._stream = Stream(tokenizer, prompt)
        self._stops = tuple(stop_strings)
        self._include = include
        self._reach = max(map(len, stop_strings), default=1) - 1
        self._tokens: list[int] = []  # read, not decoded
        self._gone: list[str] = []  # the text that was shown
        self._waiting: list[str] = []  # the text behind it that no token can change
        self._tail = ""  # the last `_reach` characters of both
        self._ended = False

    def read(self, token: int) -> str | None:
        """The stop string that is complete with this token, or None. With one the text has ended:
        no further token is read."""
        assert not self._ended, "the text has ended"
        self._tokens.append(token)
        if not self._stops:
            return None
        window = self._tail + self._decode()
        stop = self._cut(window, self._stream.held.rstrip(REPLACEMENT))
        self._tail = window[max(0, len(window) - self._reach) :]
        return stop

    def close(self) -> str | None:
        """The text ends here: held-back characters are final. A stop string that they complete, or
        None, as where the text has ended before."""
        if self._ended:
            return None
        self._decode()
        pending = self._stream.held
        stop = self._cut(self._tail, pending)
        if stop is None:
            self._end("".join(self._waiting) + pending)
        return stop

    @property
    def text(self) -> str:
        """All of the text; before its end as it is if nothing follows."""
        self._decode()
        pending = "" if self._ended else self._stream.held
        return "".join([*self._gone, *self._waiting, pending])

    def shown(self) -> str:
        """The text that may be shown and has not been: none that a later token can change or that
        a stop string may begin with. The pieces concatenate to `text` once it has ended."""
        self._decode()
        waiting = "".join(self._waiting)
        cut = len(waiting) - (0 if self._ended else self._begun())
        self._waiting = [waiting[cut:]]
        self._gone.append(waiting[:cut])
        return waiting[:cut]

    def _decode(self) -> str:
        """The text that is settled by the tokens read since the last call."""
        if not self._tokens:
            return ""
        new = self._stream.add(self._tokens)
        self._tokens = []
        self._waiting.append(new)
        return new

    def _cut(self, settled: str, pending: str) -> str | None:
        """End the text at the first stop string in `settled`, its last characters, and `pending`,
        what follows if nothing else does. The stop string, or None.

        Nothing shown lies behind the cut: a match that began there would have held it back.
        """
        window = settled + pending
        spans = [(at, at + len(stop)) for stop in self._stops if (at := window.find(stop)) >= 0]
        if not spans:
            return None
        start, end = min(spans)
        behind = len(window) - (end if self._include else start)
        waiting = "".join(self._waiting) + pending
        self._end(waiting[: len(waiting) - behind])
        return window[start:end]

    def _end(self, waiting: str) -> None:
        self._waiting = [waiting]
        self._ended = True

    def _begun(self) -> int:
        """Count the characters at the end of the settled text with which a stop string may
        begin."""
        for start in range(len(self._tail)):
            if any(stop.startswith(self._tail[start:]) for stop in self._stops):
                return len(self._tail) - start
        return 0
