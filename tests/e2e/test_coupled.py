"""rule="coupled": a seed gives one text, whatever guesses, however many, and in which batch; in
float64, where a distribution does not depend on the shape of the pass but in its last digits."""

from __future__ import annotations

import pytest
import torch

from foretoken import InputError, RefusedError
from foretoken.drafters.uniform import UniformDrafter
from foretoken.sampling.draw import SharedDraw
from foretoken.sampling.keys import draw_exponentials
from pairs import PROMPTS, V, relative, speculator, stock, target

LIMIT = 20
WAYS = ({"temperature": 1.0}, {"temperature": 1.3, "top_k": 12, "top_p": 0.8})
SEEDS = [(5, 0), (5, 1), (8, 2)]


def texts(name: str, way: dict[str, float], gammas: tuple[int, ...] = (0, 2, 5)):
    """Those of every drafter and gamma, together and alone; and how many draft tokens were kept."""
    texts_found, accepted, model = list[list[list[int]]](), 0, target(name)
    how = {"max_new_tokens": LIMIT, "rule": "coupled", **way}
    for i, drafter in enumerate([relative(model), UniformDrafter(V)]):
        pair = speculator(model, drafter)
        for gamma in gammas if i == 0 else gammas[i % 2 :: 2]:
            together = pair.generate(PROMPTS, seed=SEEDS, gamma=gamma, **how)
            texts_found.append([completion.tokens for completion in together])
            accepted += sum(completion.stats.accepted for completion in together)
        (alone,) = pair.generate(PROMPTS[1], seed=SEEDS[1:2], **how)
        streamed = [
            t for piece in pair.stream(PROMPTS[0], seed=SEEDS[:1], **how) for t in piece.tokens
        ]
        texts_found.append([streamed, alone.tokens, texts_found[0][2]])
    return texts_found, accepted


@pytest.mark.daily("Llama")
@pytest.mark.parametrize("name", ["Llama", "Gemma 3", "T5"])
def test_one_text_whatever_draft_tokens(name: str) -> None:
    for way in WAYS:
        texts_found, accepted = texts(name, way)
        assert all(text == texts_found[0] for text in texts_found)
        assert accepted > 10
        assert len({tuple(text) for text in texts_found[0]}) == 3


def test_noise_that_depends_on_the_step_breaks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a position meets other noise when another step comes to it."""

    def by_step(self, offset: int, V: int) -> torch.Tensor:
        names = zip(self.keys, self.lengths, strict=True)
        rows = [draw_exponentials(key, length * 1000 + offset, V) for key, length in names]
        return torch.stack(list(map(torch.from_numpy, rows)))

    monkeypatch.setattr(SharedDraw, "_exponentials", by_step)
    texts_found, _ = texts("Llama", WAYS[0], (0, 2))
    assert any(text != texts_found[0] for text in texts_found)


def test_at_temperature_0_it_is_greedy_and_other_seeds_give_other_texts() -> None:
    model = target("Llama")
    pair = speculator(model, relative(model))
    (greedy,) = pair.generate(PROMPTS[0], max_new_tokens=LIMIT, gamma=3, rule="coupled")
    assert greedy.tokens == stock(model, PROMPTS[0], LIMIT)
    options = {"max_new_tokens": LIMIT, "gamma": 3, "rule": "coupled", "temperature": 1.0}
    assert (
        len({tuple(pair.generate(PROMPTS[0], seed=s, **options)[0].tokens) for s in range(4)}) == 4
    )


def test_it_cannot_be_lenient() -> None:
    pair = speculator(target("Llama"), "none")
    with pytest.raises((RefusedError, InputError), match="lenience"):
        pair.generate(PROMPTS[0], rule="coupled", temperature=1.0, lenience=0.5)
