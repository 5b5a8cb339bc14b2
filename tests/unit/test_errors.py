"""Numbers and values in messages, whatever a caller gives."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

import foretoken
from foretoken.errors import (
    ControlError,
    ForeignError,
    ForetokenError,
    InputError,
    NumericsError,
    RefusedError,
    describe_mismatch,
    format_value,
    get_base_name,
    to_one_line,
)


def test_the_tree():
    assert issubclass(InputError, ForetokenError) and issubclass(InputError, ValueError)
    assert issubclass(NumericsError, RefusedError) and issubclass(RefusedError, ForetokenError)
    assert issubclass(ControlError, RefusedError) and issubclass(ForeignError, RefusedError)


def test_values_are_shown_in_one_short_line():
    assert format_value(np.eye(2)) == "array([[1., 0.], [0., 1.]])"
    assert len(format_value("x" * 500)) == 60 and format_value("x" * 500).endswith("...")
    assert format_value(10**5000) == "a int too large to show"


def test_a_librarys_message_is_one_short_line():
    assert (
        to_one_line(ValueError("a\n  b")) == "a b"
        and len(to_one_line(ValueError("x" * 500))) == 200
    )
    assert to_one_line(KeyError()) == "KeyError"


class Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    text: Annotated[str, Field(min_length=2, max_length=3)] = "ab"
    count: Annotated[int, Field(ge=1, le=5)] = 1
    loose: Annotated[int, Field(strict=False)] = 1
    share: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = 0.5
    on: bool = True
    kind: Literal["a", "b"] = "a"
    many: Annotated[list[int], Field(min_length=1)] = [1]
    more: dict[str, int] = {}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"text": 3}, "it must be text"),
        ({"text": "a"}, "it is too short; give at least 2 characters"),
        ({"text": "abcd"}, "it is too long; give at most 3 characters"),
        ({"count": 1.5}, "it must be a whole number"),
        ({"loose": "9" * 5000}, "it must be a whole number"),
        ({"count": 0}, "it must be 1 or more"),
        ({"count": 6}, "it must be 5 or less"),
        ({"share": "x"}, "it must be a number"),
        ({"share": 0.0}, "it must be above 0.0"),
        ({"share": 1.0}, "it must be below 1.0"),
        ({"share": float("nan")}, "it must be a finite number"),
        ({"on": 1}, "it must be true or false"),
        ({"kind": "c"}, "it must be one of 'a' or 'b'"),
        ({"many": []}, "it is too short; give at least 1 entries"),
        ({"many": 1}, "it must be a list"),
        ({"more": []}, "it must be an object"),
        ({"other": 1}, "it is unknown"),
    ],
)
def test_what_is_wrong_with_a_value_is_said_in_our_words(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Shape.model_validate(values)
    assert describe_mismatch(dict(caught.value.errors()[0])) == said


def test_a_look_up_in_front_of_a_folder_shows_no_folder(tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    assert (
        get_base_name(f"lookup+{draft}") == "lookup+draft" and get_base_name("lookup") == "lookup"
    )


def raised(node: ast.Raise) -> tuple[str, str] | None:
    """The class of an error and its message as the source has it, values in braces; None for one
    that is made elsewhere."""
    call = node.exc
    while isinstance(call, ast.Call) and isinstance(
        call.func, ast.Attribute
    ):  # `.with_option(option)`
        call = call.func.value
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or not call.args:
        return None
    parts = [call.args[0]]
    if isinstance(parts[0], ast.JoinedStr):
        parts = parts[0].values
    text = "".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in parts)
    return call.func.id, text


# After a semicolon, or said outright; or a library's own words for the cause, or made elsewhere
REMEDY = re.compile(r"; .|: \{\}|^\{\}$|\b(give|must|needs?|takes?|shorten)\b")
ELSEWHERE = {"{} is {}"}  # of a table with remedies


def test_every_invalid_value_is_told_with_a_remedy() -> None:
    without: list[str] = []
    for file in (Path(foretoken.__file__).parent).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            found = raised(node) if isinstance(node, ast.Raise) else None
            if (
                found
                and found[0] == "InputError"
                and not REMEDY.search(found[1])
                and found[1] not in ELSEWHERE
            ):
                without.append(f"{file.name}:{node.lineno}: {found[1]}")
    assert not without
