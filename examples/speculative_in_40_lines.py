"""Algorithm 1 of Leviathan, Kalman and Matias (2023) for one sequence: two transformers models and
nothing else. `src/foretoken/step.py` is the same algorithm over a batch, a cache and any drafter.

    python examples/speculative_in_40_lines.py "The captain looked at the sea, and"
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ASSETS = Path(__file__).parents[1] / "src" / "foretoken" / "assets"  # the pair of this repository


def distribution(logits, temperature):
    if temperature == 0:  # all of the probability on the largest logit
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    return torch.softmax(logits.float() / temperature, dim=-1)


@torch.inference_mode()
def generate(target, draft, ids, new_tokens, gamma=4, temperature=1.0):
    """Return `ids` and `new_tokens` more, distributed as if the target alone had sampled them."""
    end = len(ids) + new_tokens
    while len(ids) < end:
        # Sample gamma draft tokens x_1, .., x_gamma from M_q autoregressively
        x, q = [], []
        for _ in range(gamma):
            logits = draft(torch.tensor([ids + x])).logits[0, -1]
            q.append(distribution(logits, temperature))
            x.append(int(torch.multinomial(q[-1], 1)))

        # Run M_p in parallel: its distribution before each draft token, and behind the last
        logits = target(torch.tensor([ids + x])).logits[0, len(ids) - 1 :]
        p = distribution(logits, temperature)

        # Accept each draft token with probability min(1, p/q), up to the first that is rejected
        n = 0
        while n < gamma and torch.rand(()) * q[n][x[n]] < p[n][x[n]]:
            n += 1

        # Sample one more token: from p, or from what p has more than q where a token was rejected
        left = p[n] if n == gamma else (p[n] - q[n]).clamp(min=0)
        ids = ids + x[:n] + [int(torch.multinomial(left, 1))]
    return ids[:end]


def main(prompt):
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "target")
    target, draft = (
        AutoModelForCausalLM.from_pretrained(ASSETS / name, dtype=torch.float32)
        for name in ("target", "draft")
    )
    ids = tokenizer(prompt).input_ids
    print(tokenizer.decode(generate(target, draft, ids, new_tokens=40)))


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else "The old house stood at the end of the lane, and")
