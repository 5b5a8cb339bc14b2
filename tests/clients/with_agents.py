"""OpenAI's Agents SDK: a loop around a tool, typed output and a stream, over both APIs."""

import asyncio
from importlib.metadata import version
from typing import Any

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


async def main() -> None:
    client = AsyncOpenAI(max_retries=0)
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        model: Any = kind(MODEL, client)
        settings = ModelSettings(max_tokens=100, tool_choice="required", parallel_tool_calls=False)
        shared: Any = {"model": model, "model_settings": settings, "output_type": Weather}
        # a small model may call for ever: the tool is for the first turn
        once = function_tool(weather, is_enabled=lambda context, _: context.usage.requests == 0)
        agent: Any = Agent("one", tools=[once], **shared)
        done = await Runner.run(agent, ASK)
        kinds = [item.type for item in done.new_items]
        assert kinds[:2] == ["tool_call_item", "tool_call_output_item"], kinds
        assert kinds[-1] == "message_output_item" and isinstance(done.final_output, Weather)
        streamed = Runner.run_streamed(agent, ASK)
        events = {event.type async for event in streamed.stream_events()}
        assert {"raw_response_event", "run_item_stream_event"} <= events
        assert isinstance(streamed.final_output, Weather)


asyncio.run(main())
print(f"openai-agents {version('openai-agents')}: a tool's loop, typed output, streams, both APIs")
