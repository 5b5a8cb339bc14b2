"""Pydantic AI: typed output by tools, schema and prompt, and an agent that calls a tool."""

import asyncio
from importlib.metadata import version
from typing import Any

from pydantic_ai import Agent, NativeOutput, RunContext
from pydantic_ai.capabilities import PrepareOutputTools
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from weather import ASK, MODEL, Weather, weather

SETTINGS: Any = {"max_tokens": 70, "parallel_tool_calls": False}
for kind in (OpenAIChatModel, OpenAIResponsesModel):
    model = kind(MODEL)
    assert isinstance(Agent(model, model_settings=SETTINGS).run_sync(ASK).output, str)
    for output in (Weather, NativeOutput(Weather)):
        agent: Any = Agent(model, output_type=output, model_settings=SETTINGS)
        assert isinstance(agent.run_sync(ASK).output, Weather)

    async def first(context: RunContext[None], tool: Any) -> Any:
        """The tool is for the first turn; a small model may call it for ever."""
        return tool if context.run_step == 1 else None

    async def last(context: RunContext[None], tools: list[Any]) -> list[Any]:
        """The answer is for the second turn."""
        return tools if context.run_step > 1 else []

    async def streamed(agent: Any) -> Any:
        async with agent.run_stream(ASK) as result:
            return await result.get_output()

    later = PrepareOutputTools(last)
    agent = Agent(model, output_type=Weather, model_settings=SETTINGS, capabilities=[later])
    agent.tool_plain(weather, prepare=first)
    assert isinstance(asyncio.run(streamed(agent)), Weather)
print(f"pydantic-ai {version('pydantic-ai-slim')}: typed output, a tool, streams, both APIs")
