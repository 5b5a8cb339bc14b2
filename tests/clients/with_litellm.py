"""LiteLLM, by its providers for OpenAI's API and for vLLM's."""

import asyncio
import json
from importlib.metadata import version
from typing import Any

import litellm
from weather import ASK, MESSAGES, MODEL, URL, Weather, weather

litellm.suppress_debug_info = True
common: Any = {"messages": MESSAGES, "api_base": f"{URL}/v1", "max_tokens": 100, "num_retries": 0}
schema = Weather.model_json_schema()
tool: Any = {"type": "function", "function": {"name": "Weather", "parameters": schema}}
calling: Any = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
for model in (f"openai/{MODEL}", f"hosted_vllm/{MODEL}"):
    done = litellm.completion(
        model=model, **common, user="me", temperature=1, top_p=0.9, extra_body={"top_k": 20}
    )
    assert done.choices[0].finish_reason in ("stop", "length") and done.usage.total_tokens
    done = litellm.completion(model=model, **common, **calling)
    (call,) = done.choices[0].message.tool_calls
    Weather.model_validate_json(call.function.arguments)
    assert done.choices[0].finish_reason == "tool_calls"
    told = {"role": "tool", "tool_call_id": call.id, "name": "Weather", "content": "sun"}
    back = [*MESSAGES, done.choices[0].message.model_dump(), told]
    assert litellm.completion(model=model, **{**common, "messages": back}, tools=[tool]).choices
    chunks = litellm.completion(model=model, **common, **calling, stream=True)
    whole = litellm.stream_chunk_builder([*chunks], messages=MESSAGES)
    Weather.model_validate(json.loads(whole.choices[0].message.tool_calls[0].function.arguments))
    done = asyncio.run(litellm.acompletion(model=model, **common, response_format=Weather))
    Weather.model_validate_json(done.choices[0].message.content)
text = litellm.text_completion(
    model=f"text-completion-openai/{MODEL}", prompt=ASK, api_base=f"{URL}/v1", max_tokens=5
)
assert text.choices[0].finish_reason in ("stop", "length")
response = litellm.responses(
    model=f"openai/{MODEL}", input=ASK, api_base=f"{URL}/v1", max_output_tokens=5
)
assert response.status in ("completed", "incomplete") and weather("Rome")
print(f"litellm {version('litellm')}: openai/, hosted_vllm/, text completion, responses")
