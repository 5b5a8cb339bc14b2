"""Forced tool calls of a server: are they valid by 200 schemas, whole and streamed, eight at once,
with draft tokens and without, and what does the grammar cost?

Every schema is asked for twice whole, at gamma 0 and 3 with one seed and the coupled rule, and once
streamed; then eight streams write free text, and calls, for as many tokens each. Expected: every
call that was not cut is valid, the three are the same, and at most 10 % fewer tokens a second than
free text; forced tokens are accepted draft tokens.

    python benchmarks/tool_calls.py                                   # the pair that ships
    python benchmarks/tool_calls.py FILE.gguf --draft smollm2 --dtype int8
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import jsonschema
import openai

import machine
from server_process import foretoken, started

SCHEMAS, AT_ONCE, MOST, ROUNDS = 200, 8, 200, 5
LETTERS = 1.0  # of a prompt's schema for a token of the context, which is 512 of the small pair
WORDS = "name city day unit price color note list of and size count kind when where who".split()
# of the pair that ships, which is no chat model
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
ASK: Any = [{"role": "user", "content": "Call the function for a house by the sea."}]


def schema(dice: Random, depth: int = 0) -> dict[str, Any]:
    """A schema of the kinds that functions have, whose texts are short."""
    kinds = ["string", "integer", "number", "boolean", "enum", "const", "date"]
    kinds += ["array", "object", "either"] * (depth < 3)
    match dice.choice(kinds) if depth else "object":
        case "string":
            return {"type": "string", "maxLength": dice.randint(1, 12)}
        case "integer":
            return {"type": "integer", "minimum": -dice.randrange(99), "maximum": 999}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": 9}
        case "enum":
            return {"enum": dice.sample(WORDS, 3)}
        case "const":
            return {"const": dice.choice(WORDS)}
        case "date":
            return {"type": "string", "format": "date"}
        case "array":
            return {"type": "array", "items": schema(dice, depth + 1), "maxItems": 3}
        case "either":
            return {"anyOf": [schema(dice, depth + 1), {"type": "null"}]}
        case "object":
            names = dice.sample(WORDS, dice.randint(1, 4))
            return {
                "type": "object",
                "properties": {name: schema(dice, depth + 1) for name in names},
                "required": names[: dice.randint(1, len(names))],
                "additionalProperties": False,
            }
        case kind:
            return {"type": kind}


def asked(parameters: dict[str, Any], seed: int, gamma: int | None) -> dict[str, Any]:
    speculation = {"rule": "coupled"} | ({} if gamma is None else {"gamma": gamma})
    return {
        "messages": ASK,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "max_tokens": MOST,
        "temperature": 1.0,
        "seed": seed,
        "extra_body": {"speculation": speculation},
    }


async def whole(client: openai.AsyncOpenAI, model: str, body: dict[str, Any]) -> tuple[str, str]:
    """A call's arguments, and why the reply ended."""
    done = (await client.chat.completions.create(model=model, **body)).choices[0]
    calls = done.message.tool_calls or []
    return calls[0].function.arguments if calls else "", done.finish_reason


async def streamed(client: openai.AsyncOpenAI, model: str, body: dict[str, Any]) -> tuple[str, str]:
    arguments, reason = "", ""
    async for chunk in await client.chat.completions.create(model=model, stream=True, **body):
        for call in chunk.choices[0].delta.tool_calls or ():
            arguments += call.function.arguments or ""
        reason = chunk.choices[0].finish_reason or reason
    return arguments, reason


async def validity(
    client: openai.AsyncOpenAI, model: str, context: int | None, schemas: int
) -> dict[str, int]:
    counts = {"schemas": schemas, "too_long": 0, "cut": 0, "invalid": 0, "differ": 0}
    dice, slots = Random(0), asyncio.Semaphore(AT_ONCE)

    async def one(number: int, parameters: dict[str, Any]) -> None:
        async with slots:
            prompt = len(str(asked(parameters, number, 0)["tools"]))
            if context is not None and prompt > LETTERS * (context - MOST):
                counts["too_long"] += 1
                return
            plain = await whole(client, model, asked(parameters, number, 0))
            guessed = await whole(client, model, asked(parameters, number, 3))
            pieces = await streamed(client, model, asked(parameters, number, 3))
        counts["differ"] += not plain == guessed == pieces
        for arguments, reason in (plain, guessed, pieces):
            if reason == "length":
                counts["cut"] += 1
                continue
            try:
                jsonschema.validate(json.loads(arguments), parameters)
            except (ValueError, jsonschema.ValidationError):
                counts["invalid"] += 1

    await asyncio.gather(*(one(number, schema(dice)) for number in range(schemas)))
    return counts


async def speed(client: openai.AsyncOpenAI, model: str) -> dict[str, float]:
    """Tokens a second of eight streams: free text, and calls whose list ends before no limit."""
    item = {"type": "object", "properties": {w: {"type": "string"} for w in WORDS[:3]}}
    item |= {"required": WORDS[:3], "additionalProperties": False}
    parameters = {
        "type": "object",
        "properties": {"all": {"type": "array", "items": item, "minItems": 99}},
    }
    parameters |= {"required": ["all"], "additionalProperties": False}
    rates: dict[str, list[float]] = {"free": [], "forced": []}
    accepted = drafted = 0
    for number in range(ROUNDS + 1):
        for kind in rates:
            body = asked(parameters, number, None)
            if kind == "free":
                told = {"role": "system", "content": json.dumps(body["tools"])}
                body = {k: v for k, v in body.items() if not k.startswith("tool")}
                body["messages"] = [told, *ASK]  # a prompt as long
                body["extra_body"]["ignore_eos"] = True
            body["extra_body"]["speculation"]["steps"] = True
            body["max_tokens"] = 128
            start = perf_counter()
            answers = await asyncio.gather(
                *(
                    client.chat.completions.create(model=model, **body | {"seed": number * 99 + i})
                    for i in range(AT_ONCE)
                )
            )
            seconds = perf_counter() - start
            if number:  # the first round warms up
                tokens = sum(answer.usage.completion_tokens for answer in answers if answer.usage)
                rates[kind].append(tokens / seconds)
            if kind == "forced":
                told: list[Any] = [getattr(answer, "speculation", None) for answer in answers]
                accepted += sum(each["accepted"] for each in told if each)
                drafted += sum(each["drafted"] for each in told if each)
    free, forced = (median(rates[kind]) for kind in ("free", "forced"))
    return {
        "free": free,
        "forced": forced,
        "ratio": forced / free,
        "drafted": drafted,
        "accepted": accepted,
    }


async def measured(url: str, schemas: int) -> dict[str, Any]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=600) as client:
        served: Any = (await client.models.list()).data[0]
        model = served.id
        valid = await validity(client, model, served.max_model_len, schemas)
        return {"validity": valid, "speed": await speed(client, model)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", nargs="?")
    parser.add_argument("--draft")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--schemas", type=int, default=SCHEMAS)
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        template = Path(folder) / "chat.jinja"
        template.write_text(TEMPLATE)
        own = [] if given.target else ["--chat-template", str(template)]
        more = ["--max-rows", str(AT_ONCE), *own]
        with started(foretoken(given.target, given.draft, given.dtype, *more)) as server:
            result = asyncio.run(measured(server.url, given.schemas))
    print(json.dumps(result, indent=2))
    name = "tool-calls-default-pair" if given.target is None else "tool-calls-smollm2"
    print(machine.save(name, {"dtype": given.dtype, **result}))


if __name__ == "__main__":
    main()
