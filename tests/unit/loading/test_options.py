"""An option of `load` is declared once: its signature, its docstring, the command line and a
measurement all have it."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest

import foretoken
from foretoken.cli.option import PairLoading
from foretoken.errors import InputError
from foretoken.loading.options import OPTIONS, LoadKeywords, LoadOptions

PARAMETERS = inspect.signature(foretoken.load).parameters
WORD = "generation_config"  # the command line has a flag for it


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_is_wherever_text_can_hold_it(name: str) -> None:
    option = OPTIONS[name]
    assert option.help.endswith((".", "...")) and name in LoadKeywords.__annotations__
    assert PARAMETERS[name].default == getattr(LoadOptions(), name)
    assert f"{name}: {option.help}" in (inspect.getdoc(foretoken.load) or "")
    line = {field.name for field in fields(PairLoading)}
    assert (name in {WORD if each == f"ignore_{WORD}" else each for each in line}) == (
        option.panel is not None
    )


def test_there_is_no_other() -> None:
    assert [*PARAMETERS][2:] == [*OPTIONS] == [*LoadKeywords.__annotations__]
    for given, said in (
        ({"dytpe": "int8"}, "^dytpe is no option of load; did you mean dtype?"),
        (
            {"temperature": 0.5},
            "^temperature is no option of load; give it to generate, or leave it out$",
        ),
    ):
        with pytest.raises(InputError, match=said):
            foretoken.load(None, "none", **given)


def test_what_there_is_not_is_refused_before_a_model_is_read() -> None:
    with pytest.raises(InputError, match="draft_taps is 'states'") as error:
        LoadOptions(draft_taps="states")
    assert error.value.option == "draft_taps"
