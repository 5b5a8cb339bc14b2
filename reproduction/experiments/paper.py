"""The paper's tables and figures as data (arXiv 2211.17192v2).

Names are the paper's. Where a printed figure errs, docs/paper_map.md says so.
"""

from __future__ import annotations

from typing import NamedTuple


class Balance(NamedTuple):
    """A line of table 1, where c = c_hat = 0."""

    alpha: float
    gamma: int
    operations: float
    speed: float


class PrintedSpeed(NamedTuple):
    """A line of tables 2 and 4: T5-XXL on a TPU-v4, batch 1."""

    task: str
    draft: str
    temperature: int
    gamma: int
    alpha: float
    c: float
    expected: float
    measured: float


class PrintedAlpha(NamedTuple):
    """A line of table 3: alpha at temperature 0 and 1."""

    task: str
    draft: str
    greedy: float
    sampled: float


class Lenient(NamedTuple):
    """A line of table 5: alpha at each of LENIENCES, temperature 1, English to German."""

    draft: str
    alphas: tuple[float, float, float, float]


TABLE_1 = (
    Balance(0.6, 2, 1.53, 1.96),
    Balance(0.7, 3, 1.58, 2.53),
    Balance(0.8, 2, 1.23, 2.44),
    Balance(0.8, 5, 1.63, 3.69),
    Balance(0.9, 2, 1.11, 2.71),
    Balance(0.9, 10, 1.60, 6.86),
)
TABLE_2 = (  # with table 4
    PrintedSpeed("EnDe", "T5-small", 0, 7, 0.75, 0.02, 3.2, 3.4),
    PrintedSpeed("EnDe", "T5-base", 0, 7, 0.80, 0.04, 3.3, 2.8),
    PrintedSpeed("EnDe", "T5-large", 0, 7, 0.82, 0.11, 2.5, 1.7),
    PrintedSpeed("EnDe", "T5-small", 1, 7, 0.62, 0.02, 2.3, 2.6),
    PrintedSpeed("EnDe", "T5-base", 1, 5, 0.68, 0.04, 2.4, 2.4),
    PrintedSpeed("EnDe", "T5-large", 1, 3, 0.71, 0.11, 2.0, 1.4),
    PrintedSpeed("CNNDM", "T5-small", 0, 5, 0.65, 0.02, 2.4, 3.1),
    PrintedSpeed("CNNDM", "T5-base", 0, 5, 0.73, 0.04, 2.6, 3.0),
    PrintedSpeed("CNNDM", "T5-large", 0, 3, 0.74, 0.11, 2.0, 2.2),
    PrintedSpeed("CNNDM", "T5-small", 1, 5, 0.53, 0.02, 1.9, 2.3),
    PrintedSpeed("CNNDM", "T5-base", 1, 3, 0.55, 0.04, 1.8, 2.2),
    PrintedSpeed("CNNDM", "T5-large", 1, 3, 0.56, 0.11, 1.6, 1.7),
)
TABLE_3 = (
    PrintedAlpha("GPT-like", "Unigram", 0.03, 0.03),
    PrintedAlpha("GPT-like", "Bigram", 0.05, 0.05),
    PrintedAlpha("GPT-like", "GPT-like 6M", 0.88, 0.89),
    PrintedAlpha("EnDe", "Unigram", 0.08, 0.07),
    PrintedAlpha("EnDe", "Bigram", 0.20, 0.19),
    PrintedAlpha("EnDe", "T5-small", 0.75, 0.62),
    PrintedAlpha("EnDe", "T5-base", 0.80, 0.68),
    PrintedAlpha("EnDe", "T5-large", 0.82, 0.71),
    PrintedAlpha("CNNDM", "Unigram", 0.13, 0.08),
    PrintedAlpha("CNNDM", "Bigram", 0.23, 0.16),
    PrintedAlpha("CNNDM", "T5-small", 0.65, 0.53),
    PrintedAlpha("CNNDM", "T5-base", 0.73, 0.55),
    PrintedAlpha("CNNDM", "T5-large", 0.74, 0.56),
    PrintedAlpha("LaMDA", "LaMDA 100M", 0.61, 0.57),
    PrintedAlpha("LaMDA", "LaMDA 2B", 0.71, 0.71),
    PrintedAlpha("LaMDA", "LaMDA 8B", 0.75, 0.74),
)
ALPHA_TOKENS = 10_000  # behind each alpha of table 3 (section 4.2)
LENIENCES = (1.0, 0.5, 0.3, 0.1)
TABLE_5 = (
    Lenient("Unigram", (0.07, 0.10, 0.11, 0.16)),
    Lenient("Bigram", (0.19, 0.23, 0.25, 0.32)),
    Lenient("T5-small", (0.62, 0.71, 0.76, 0.84)),
    Lenient("T5-base", (0.68, 0.80, 0.83, 0.90)),
)
LENIENT_C = 0.015  # appendix A.5, T5-small
GREEDY_LENIENT_GAMMA = 8
GREEDY_LENIENT_ALPHAS = (0.75, 0.75, 0.80, 0.87)
GREEDY_LENIENT_SPEEDS = (3.3, 3.3, 3.9, 4.9)
BIGRAM_ALPHA, BIGRAM_GAMMA, BIGRAM_SPEED = 0.2, 3, 1.25  # sections 3.6 and 4.2
FIGURE_1_TOKENS, FIGURE_1_RUNS = 38, 9
FIGURE_5_GAMMAS = (7, 3, 0)  # 0: plain decoding


def agreement(task: str | None, draft: str | None, temperature: float) -> float | None:
    """alpha of table 3, where it has that line at that temperature."""
    for line in TABLE_3:
        if (line.task, line.draft) == (task, draft):
            return {0.0: line.greedy, 1.0: line.sampled}.get(temperature)
    return None


def speed(task: str | None, draft: str | None, temperature: float) -> PrintedSpeed | None:
    """The line of tables 2 and 4, where they have it."""
    key = (task, draft, temperature)
    return next((s for s in TABLE_2 if (s.task, s.draft, s.temperature) == key), None)


def lenient(draft: str | None, lenience: float, temperature: float) -> float | None:
    """alpha of table 5, or of appendix A.5's text at temperature 0."""
    if lenience not in LENIENCES:
        return None
    at = LENIENCES.index(lenience)
    if temperature == 0:
        return GREEDY_LENIENT_ALPHAS[at] if draft == "T5-small" else None
    return next((line.alphas[at] for line in TABLE_5 if line.draft == draft), None)
