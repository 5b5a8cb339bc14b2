"""Uniformly random draft tokens, and the distribution that comes with them."""

import pytest
import torch

from foretoken.drafters.base import Draw
from foretoken.drafters.uniform import UniformDrafter
from foretoken.errors import InputError
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.keys import SequenceKey

SAMPLED = SamplingParams(1.0)


def draws(B, params=SAMPLED):
    return Draw([SequenceKey(3, b) for b in range(B)], [5] * B, [params] * B)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_q_is_uniform_at_any_temperature_and_takes_no_memory(temperature):
    params = SamplingParams(temperature, top_k=2)
    draft = UniformDrafter(8).propose([2, 0, 3], draws(3, params))
    assert draft.lengths.tolist() == [2, 0, 3]
    assert draft.tokens.shape == (3, 3)
    assert draft.q is not None and draft.calls == 0
    assert torch.equal(draft.q, torch.full((3, 3, 8), 1 / 8))
    assert draft.q.untyped_storage().nbytes() == 8 * 8


def test_vocab_size_is_a_whole_number_from_1():
    for size, remedy in ((0, "the target's, 1 or more"), (2.5, "a whole number")):
        with pytest.raises(InputError, match=f"^vocab_size is {size}; give {remedy}"):
            UniformDrafter(size)
