"""Instructor in its modes: tools, a schema, JSON, and OpenAI's responses."""

from importlib.metadata import version
from typing import Any

import instructor
import openai
from instructor.core.exceptions import IncompleteOutputException, InstructorRetryException
from weather import MESSAGES, MODEL, Weather

MODES = ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS")
for name in MODES:
    client = instructor.from_openai(openai.OpenAI(max_retries=0), mode=instructor.Mode[name])
    common: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 150, "max_retries": 0}
    given = client.chat.completions.create(**common, response_model=Weather)
    assert isinstance(given, Weather), name
    if name != "RESPONSES_TOOLS":
        *_, final = client.chat.completions.create_partial(**common, response_model=Weather)
        assert (final.city, final.days) != (None, None), name

# This mode asks for any object and shows the schema to the model, which a small one does not follow
client = instructor.from_openai(openai.OpenAI(max_retries=0), mode=instructor.Mode.JSON)
seen: list[Any] = []
client.on("completion:response", seen.append)
try:
    client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=60, max_retries=1, response_model=Weather
    )
except (InstructorRetryException, IncompleteOutputException):
    pass
assert seen and all(each.choices[0].message.content.lstrip()[:1] == "{" for each in seen)
print(f"instructor {version('instructor')}: {', '.join(MODES)}, JSON")
