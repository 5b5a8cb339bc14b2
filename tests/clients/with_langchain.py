"""LangChain: bound tools, structured output in each of its ways, and both of OpenAI's APIs."""

from contextlib import suppress
from importlib.metadata import version
from typing import Any

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from weather import ASK, MODEL, Weather, weather

for responses in (False, True):
    settings: Any = {"stream_usage": True, "use_responses_api": responses, "max_retries": 0}
    model: Any = ChatOpenAI(model=MODEL, max_tokens=100, **settings)
    assert model.invoke(ASK).usage_metadata["total_tokens"]
    chunks = [*model.stream(ASK)]
    assert sum(bool(chunk.usage_metadata) for chunk in chunks) == 1
    bound = model.bind_tools([weather], tool_choice="any", parallel_tool_calls=False, strict=True)
    said = bound.invoke(ASK)
    (call,) = said.tool_calls
    assert call["name"] == "weather" and not said.invalid_tool_calls
    told = ToolMessage(weather(**call["args"]), tool_call_id=call["id"])
    answer = model.bind_tools([weather]).invoke([HumanMessage(ASK), said, told])
    assert answer.type == "ai"
    whole = None
    for chunk in bound.stream(ASK):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls[0]["args"]["city"] in ("Rome", "Oslo")
    for method in ("json_schema", "function_calling"):
        given = model.with_structured_output(Weather, method=method).invoke(ASK)
        assert isinstance(given, Weather), method
    anything = model.with_structured_output(Weather, method="json_mode", include_raw=True)
    with suppress(openai.LengthFinishReasonError):  # a small model does not end an object soon
        assert anything.invoke(ASK)["raw"].text.lstrip().startswith("{")
assert isinstance(OpenAI(model=MODEL, max_tokens=5, max_retries=0).invoke(ASK), str)
print(f"langchain-openai {version('langchain-openai')}: tools, structured output, both APIs")
