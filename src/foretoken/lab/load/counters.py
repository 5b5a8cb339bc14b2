"""What a server counts of its guesses, as Prometheus reads it: our own names, or vLLM's."""

from __future__ import annotations

import re
from dataclasses import dataclass

NAMES = {
    "tokens": "generation_tokens",
    "drafted": "drafted_tokens",
    "accepted": "accepted_tokens",
}
VLLM = {
    "tokens": "generation_tokens",
    "drafted": "spec_decode_num_draft_tokens",
    "accepted": "spec_decode_num_accepted_tokens",
}
KIND = re.compile(r"^# TYPE ([a-z_:]+?)(?:_total)? counter$", re.MULTILINE)
SAMPLE = re.compile(r"^([a-z_:]+?)(?:_total)?(?:\{.*\})? ([0-9.eE+-]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Counters:
    """Of all requests since the server began."""

    tokens: int
    drafted: int
    accepted: int

    def since(self, before: Counters) -> Counters:
        return Counters(
            self.tokens - before.tokens,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
        )

    @property
    def tokens_per_call(self) -> float | None:
        """A target call gives a text the guesses that it accepts and one token of its own, so
        there are as many calls as tokens that were not guessed; but for a text's last call, whose
        own token may lie beyond the text's end. None without tokens."""
        calls = self.tokens - self.accepted
        return self.tokens / calls if calls > 0 else None

    @property
    def accepted_per_drafted(self) -> float | None:
        """None without guesses."""
        return self.accepted / self.drafted if self.drafted else None


def counters(text: str) -> Counters | None:
    """Those in a server's metrics; None where it does not count guesses."""
    sums = dict.fromkeys(KIND.findall(text), 0.0)  # before the first request there are no samples
    for name, value in SAMPLE.findall(text):
        if name in sums:
            sums[name] += float(value)
    for prefix, names in (("foretoken_", NAMES), ("vllm:", VLLM)):
        values = {ours: sums.get(prefix + theirs) for ours, theirs in names.items()}
        if all(value is not None for value in values.values()):
            return Counters(**{name: int(value or 0) for name, value in values.items()})
    return None
