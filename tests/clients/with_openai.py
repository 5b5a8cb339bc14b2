"""OpenAI's own package: chats, completions, responses, and its helpers that parse."""

import json
from typing import Any

import openai
from weather import ASK, MESSAGES, MODEL, Weather

client = openai.OpenAI(max_retries=0)
common: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 100}
assert MODEL in [each.id for each in client.models.list()]

# Chats, parsed: what is not, whole and in pieces, has tests in tests/unit/server
parsed = client.chat.completions.parse(**common, response_format=Weather)
assert isinstance(parsed.choices[0].message.parsed, Weather)
tool = openai.pydantic_function_tool(Weather)
one: Any = {"tools": [tool], "parallel_tool_calls": False}
parsed = client.chat.completions.parse(**common, **one, tool_choice="required")
call = (parsed.choices[0].message.tool_calls or [])[0]
assert isinstance(call.function.parsed_arguments, Weather)
named: Any = {"type": "function", "function": {"name": "Weather"}}
with client.chat.completions.stream(**common, **one, tool_choice=named) as stream:
    kinds = {event.type for event in stream}
    whole = stream.get_final_completion().choices[0]
assert "tool_calls.function.arguments.done" in kinds and whole.finish_reason == "tool_calls"
call = (whole.message.tool_calls or [])[0]
assert isinstance(call.function.parsed_arguments, Weather)
told = {"role": "tool", "tool_call_id": call.id, "content": "sun"}
back = [*MESSAGES, whole.message.model_dump(exclude_none=True, exclude={"parsed"}), told]
assert client.chat.completions.create(**{**common, "messages": back}, tools=[tool]).choices

# Responses: parsed, in pieces, a call and what it gave
asked: Any = {"model": MODEL, "max_output_tokens": 100, "store": False}
given = client.responses.parse(**asked, input=ASK, instructions="Be brief.", text_format=Weather)
assert isinstance(given.output_parsed, Weather) and given.status == "completed" and given.usage
flat: Any = {"type": "function", **tool["function"]}
with client.responses.stream(
    **asked, input=ASK, tools=[flat], tool_choice="required", parallel_tool_calls=False
) as stream:
    kinds = {event.type for event in stream}
    response = stream.get_final_response()
assert "response.function_call_arguments.done" in kinds and response.status == "completed"
item: Any = response.output[0]
Weather.model_validate(json.loads(item.arguments))
output = {"type": "function_call_output", "call_id": item.call_id, "output": "sun"}
turns: Any = [{"role": "user", "content": ASK}, item, output]
assert client.responses.create(**asked, input=turns, tools=[flat]).output

try:
    client.chat.completions.create(**common, temperature=-1)
    raise AssertionError("a temperature below 0 goes")
except openai.BadRequestError as error:
    assert error.param == "temperature"
print(f"openai {openai.__version__}: chats, completions, responses, parse, streams, errors")
