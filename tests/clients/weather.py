"""The object that clients ask for: so narrow that any model writes a valid one soon."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import BaseModel, Field

URL, MODEL = os.environ["FORETOKEN_URL"], os.environ["FORETOKEN_MODEL"]
ASK = "Rome or Oslo?"
MESSAGES = [{"role": "user", "content": ASK}]


class Weather(BaseModel, extra="forbid"):
    """Tell the weather of a city."""

    city: Literal["Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Tell the weather of a city."""
    assert city in ("Rome", "Oslo")
    return f"sun in {city}"
