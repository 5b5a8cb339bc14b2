"""A target and its draft: which shapes a fresh draft may have, and which pairs are refused."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from foretoken.cli.train import distill as command
from foretoken.cli.train import parse_shape
from foretoken.errors import InputError, RefusedError
from foretoken.train.pair import load_pair, make_random_draft
from tiny import byte_level, folder, llama, t5

V = 64


def test_the_shape_of_the_documents_fits_the_pair_that_ships():
    asked = inspect.signature(command).parameters["shape"].annotation.__metadata__[0].help
    match = re.search(r"num_hidden_layers=[\w=,]+\w", asked).group()
    text = (Path(__file__).parents[3] / "docs" / "drafts.md").read_text(encoding="utf-8")
    assert f"--shape {match}" in " ".join(text.split())
    draft = load_pair(None, None, parse_shape(match), 0).draft
    assert draft.config.num_hidden_layers == 1 and draft.config.hidden_size == 96


def test_sizes_by_their_common_names_and_two_that_go_together_only():
    draft = make_random_draft(t5(), {"hidden_size": 20, "num_layers": 1}, 0)
    assert draft.config.d_model == 20 and draft.config.num_decoder_layers == 2
    target = llama(V=V)
    heads = target.config.num_attention_heads
    shape = {"hidden_size": 4 * (heads + 1), "num_attention_heads": heads + 1}
    assert make_random_draft(
        target, shape | {"num_key_value_heads": 1}, 0
    ).config.hidden_size == 4 * (heads + 1)


def test_invalid_pairs(tmp_path):
    target = str(folder(tmp_path / "target", llama(), byte_level()))
    other = str(folder(tmp_path / "other", llama(V=300), byte_level(300)))
    heard = str(folder(tmp_path / "heard", t5(), byte_level()))
    wide = str(folder(tmp_path / "wide", llama(V=328), byte_level()))
    for draft, said in (
        (other, "has another tokenizer"),
        (heard, "is an encoder-decoder, but the target is decoder-only"),
        (wide, "has 328 output rows, but the target has 320"),
    ):
        with pytest.raises(RefusedError, match=said):
            load_pair(target, draft, {}, 0)
    for draft, shape, said in (
        (None, {}, "no draft; give a folder"),
        (other, {"hidden_size": 8}, "not both"),
        (
            None,
            {"width": 8},
            "width is not a size of a llama model .*; give one of hidden_size, inter",
        ),
        (None, {"vocab_size": 8}, "vocab_size is not a size .* that may differ"),
        (None, {"model_type": "foo"}, "model_type is not a size"),
        (None, {"to_dict": 1}, "to_dict is not a size"),
        (None, {"is_encoder_decoder": True}, "is_encoder_decoder is not a size"),
        (None, {"num_hidden_layers": "x"}, "num_hidden_layers is x; give an integer"),
        (None, {"num_hidden_layers": 0}, "num_hidden_layers is 0; give an integer"),
        (None, {"hidden_size": True}, "hidden_size is True; give an integer"),
        (None, {"hidden_size": 33}, "no model has the shape .* not a multiple"),
        (None, {"num_key_value_heads": 3}, "no model has the shape"),
    ):
        with pytest.raises(InputError, match=said) as error:
            load_pair(target, draft, shape, 0)
        assert "\n" not in str(error.value)
