"""The file of a measurement: read as it was written; other files are refused by name."""

from __future__ import annotations

import json

import pytest
from measurements import document, spread

from foretoken.errors import InputError
from foretoken.sampling.params import SamplingParams
from reproduction.measurement import Measurement, load, parse


def test_what_follows_from_the_numbers():
    measurement = parse(
        document([0.5], 0.1, passes=[1.0, 1.5], temperature=0.7, top_k=4), Measurement, ""
    )
    assert measurement.v == [1.0, 1.5] and measurement.c == pytest.approx(0.1)
    assert measurement.c_hat == 0.02
    assert measurement.options.sampling == SamplingParams(0.7, top_k=4)


def test_a_file_is_read_as_it_was_written(tmp_path):
    """Of a version before too: what it wrote beside is passed over."""
    measurement = parse(document([0.5], 0.1), Measurement, "by hand")
    measurement.save(tmp_path / "m.json")
    assert load(tmp_path / "m.json") == measurement


def test_other_files(tmp_path):
    path = tmp_path / "m.json"

    def refusal(text: str) -> str:
        path.write_text(text)
        with pytest.raises(InputError) as error:
            load(path)
        assert str(path) in str(error.value) and "\n" not in str(error.value)
        return str(error.value)

    whole = document([0.5], 0.1)
    path.write_text(json.dumps(whole))
    assert load(path).alpha.value == 0.5
    assert "cannot be read" in refusal(json.dumps(whole)[:-20])
    assert "is no measurement" in refusal("[1]")
    assert "has version 9, not 1" in refusal(json.dumps(whole | {"version": 9}))
    assert "alpha.low" in refusal(json.dumps(whole | {"alpha": {"value": 1, "high": 1}}))
    assert "NaN is no JSON" in refusal(json.dumps(whole | {"tokens": float("nan")}))
    assert "prompts and passes: too few" in refusal(json.dumps(whole | {"passes": []}))
    assert "prompts and passes: too few" in refusal(json.dumps(whole | {"prompts": []}))
    never = [spread(0.0), *whole["passes"]]
    assert "passes: there must be" in refusal(json.dumps(whole | {"passes": never}))
    with pytest.raises(InputError, match="there is no .*no.json; make it with"):
        load(tmp_path / "no.json")
    with pytest.raises(InputError, match="cannot be read"):
        load(tmp_path)
