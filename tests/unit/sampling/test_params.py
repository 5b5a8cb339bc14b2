"""How a law is standardized: numbers of every kind are taken, all else is refused in a line."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from foretoken.errors import InputError
from foretoken.sampling.distributions import law
from foretoken.sampling.params import SamplingParams

HUGE = 10**400  # an integer that no float comes near


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0; give 0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": HUGE}, "temperature is inf; give 0"),
        ({"temperature": Fraction(HUGE)}, "temperature is inf; give 0"),
        ({"temperature": Decimal(1)}, r"temperature is Decimal\('1'\); give a number"),
        ({"temperature": torch.tensor(1.0)}, r"temperature is tensor\(1.\); give a number"),
        ({"temperature": True}, "temperature is True; give a number"),
        ({"temperature": np.bool_(True)}, "temperature is np.True_; give a number"),
        ({"temperature": 1j}, "temperature is 1j; give a number"),
        ({"top_k": -1}, "top_k is -1; give 0"),
        ({"top_k": -(10**5000)}, "top_k is a int too large to show; give 0"),
        ({"top_k": np.float64(2)}, r"top_k is np.float64\(2.0\); give a whole number"),
        ({"top_p": 0.0}, r"top_p is 0.0; give a number in \(0, 1\]"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_p": HUGE}, "top_p is inf"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": 1.5}, "min_p is 1.5"),
    ],
)
def test_values_that_are_refused(changes, message):
    with pytest.raises(InputError, match=f"^{message}"):
        SamplingParams(**changes)


@pytest.mark.parametrize("kind", [Fraction, np.float16, np.float32, np.float64, float])
@pytest.mark.parametrize("count", [np.int8, np.int64, int])
def test_fractions_and_numbers_of_numpy_are_numbers(kind, count):
    """torch divides by no Fraction, and JSON holds nothing of NumPy's."""
    given = SamplingParams(kind(0.5), count(3), kind(0.75), kind(0.125))
    assert given == SamplingParams(0.5, 3, 0.75, 0.125)
    assert json.dumps(asdict(given)) == json.dumps(asdict(SamplingParams(0.5, 3, 0.75, 0.125)))
    logits = torch.randn(2, 9, generator=torch.manual_seed(0))
    assert torch.equal(law(logits, given), law(logits, SamplingParams(0.5, 3, 0.75, 0.125)))


def test_top_k_may_be_larger_than_any_vocabulary():
    logits = torch.randn(2, 9, generator=torch.manual_seed(0))
    assert torch.equal(law(logits, SamplingParams(1.0, HUGE)), law(logits, SamplingParams(1.0)))
