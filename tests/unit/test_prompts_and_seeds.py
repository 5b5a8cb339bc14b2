"""Prompts of every form, and seeds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from foretoken import inputs
from foretoken.errors import InputError
from foretoken.sampling import speculation, verifier
from foretoken.sampling.keys import SequenceKey
from tiny import byte_level

ONE, TWO = [5, 6, 7], [[5, 6, 7], [8, 9, 1]]


@pytest.mark.parametrize(
    "prompts",
    [
        ONE,
        tuple(ONE),
        torch.tensor(ONE),
        torch.tensor(ONE, dtype=torch.int16),
        np.array(ONE),
        np.array(ONE, dtype=np.uint8),
        list(np.array(ONE)),
        list(torch.tensor(ONE)),
        [torch.tensor(ONE)],
        torch.tensor([ONE]),
        {"input_ids": ONE},
        {"input_ids": [ONE], "attention_mask": [[1, 1, 1]]},
        BatchEncoding({"input_ids": ONE, "attention_mask": [1, 1, 1]}),
        {
            "input_ids": torch.tensor([[0, *ONE, 0]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1, 0]]),
        },
        {"input_ids": np.array([0, *ONE]), "attention_mask": np.array([0, 1, 1, 1]) > 0},
    ],
)
def test_one_prompt(prompts):
    (ids,) = inputs.to_prompt_list(prompts)
    assert ids == ONE and all(type(token) is int for token in ids)


@pytest.mark.parametrize(
    "prompts",
    [
        torch.tensor(TWO),
        np.array(TWO),
        [torch.tensor(row) for row in TWO],
        [np.array(row) for row in TWO],
        (TWO[0], np.array(TWO[1])),
        {"input_ids": TWO},
    ],
)
def test_two_prompts(prompts):
    assert inputs.to_prompt_list(prompts) == TWO


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["pt", "np", None])
def test_what_a_tokenizer_returns_is_read_without_its_padding(side, kind):
    tokenizer = byte_level()
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token or "a", side
    texts = ["It was", "It was the first day", "a"]
    ragged = [tokenizer(text).input_ids for text in texts]
    assert inputs.to_prompt_list(tokenizer(texts, padding=True, return_tensors=kind)) == ragged
    assert inputs.to_prompt_list(tokenizer(texts)) == ragged
    assert inputs.to_prompt_list(tokenizer(texts[0])) == ragged[:1]


def test_texts_stay_texts():
    assert inputs.to_prompt_list(np.array(["a", "b"])) == ["a", "b"]
    assert inputs.to_prompt_list(["a", torch.tensor(ONE)]) == ["a", ONE]
    assert inputs.to_prompt_list(torch.zeros(0, 4, dtype=torch.long)) == []


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        (torch.tensor([0.5, 1.0]), "prompt 0 is 0.5; give a str or a list of ids"),
        (np.array([[1.0]]), r"prompt 0 is \[1.0\]"),
        (torch.tensor([True]), "prompt 0 is True"),
        (torch.tensor(3), "prompts is a Tensor; give a str, ids, or a list of prompts"),
        (np.int64(3), "prompts is a int64"),
        (torch.zeros(1, 1, 1, dtype=torch.long), r"prompt 0 is \[\[0\]\]"),
        ({"ids": ONE}, "prompts has no input_ids; give the output of a tokenizer, or ids"),
        ({"input_ids": 3}, "prompts is a dict"),
        ({"input_ids": ONE, "attention_mask": [1]}, "attention_mask does not have the shape of"),
        ({"input_ids": ONE, "attention_mask": 1}, "attention_mask does not have the shape of"),
        ({"input_ids": [ONE], "attention_mask": [[[1]] * 3]}, "does not have the shape"),
        ({"input_ids": [1.5], "attention_mask": [1]}, "prompt 0 is 1.5"),
    ],
)
def test_what_is_no_prompt(prompts, says):
    with pytest.raises(InputError, match=says):
        inputs.to_prompt_list(prompts)


def test_seeds_of_numpy():
    keys = inputs.make_keys(np.int64(3), [1, 1])
    assert keys == [SequenceKey(3, 0), SequenceKey(3, 1)] and type(keys[0].seed) is int
    assert inputs.make_keys([np.uint8(4), (np.int32(5), 6)], [1, 1]) == [
        SequenceKey(4, 0),
        SequenceKey(5, 6),
    ]


def test_every_name_has_its_rule():
    assert set(speculation.RULE_NAMES) == {*verifier.RULES_BY_NAME, speculation.COUPLED_RULE}
