"""OpenAI's Agents SDK: a loop around a tool, typed output and a stream, over both APIs."""

import asyncio
from importlib.metadata import version
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from weather import ASK, MODEL, Weather, weather

set_tracing_disabled(True)

# A small model may call for ever: the tool is there until it has run
ran: list[str] = []


@function_tool(is_enabled=lambda *_: not ran)
def forecast(city: Literal["Rome", "Oslo"]) -> str:
    """Tell the weather of a city."""
    ran.append(weather(city))
    return ran[-1]


async def main() -> None:
    client = AsyncOpenAI(max_retries=0)
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        model: Any = kind(MODEL, client)
        settings = ModelSettings(max_tokens=100, tool_choice="required", parallel_tool_calls=False)
        shared: Any = {"model": model, "model_settings": settings, "output_type": Weather}
        agent: Any = Agent("one", tools=[forecast], **shared)
        ran.clear()
        done = await Runner.run(agent, ASK)
        kinds = [item.type for item in done.new_items]
        assert kinds[:2] == ["tool_call_item", "tool_call_output_item"], kinds
        assert kinds[-1] == "message_output_item" and isinstance(done.final_output, Weather)
        ran.clear()
        streamed = Runner.run_streamed(agent, ASK)
        events = {event.type async for event in streamed.stream_events()}
        assert {"raw_response_event", "run_item_stream_event"} <= events
        assert isinstance(streamed.final_output, Weather)


asyncio.run(main())
print(f"openai-agents {version('openai-agents')}: a tool's loop, typed output, streams, both APIs")
