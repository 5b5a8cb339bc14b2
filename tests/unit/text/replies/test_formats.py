"""Formats of replies: replies in each model's form, made by hand, are read back however they are
cut, follow the grammar that forces them, and nothing of a broken one is lost."""

from __future__ import annotations

import json
import random
from functools import lru_cache
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from foretoken.errors import InputError
from foretoken.text.replies.calls import FunctionSignature, build_json_rule
from foretoken.text.replies.formats import HERMES_FORMAT, REPLY_FORMATS, find_format, get_format
from foretoken.text.replies.grammar import GrammarWriter, ReplyRequirements, ThinkingMode
from foretoken.text.replies.reader import (
    ReplyEvent,
    ReplyReader,
    build_format_regions,
    build_template_regions,
    find_open_region,
)

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "warm": {"type": "boolean"},
    },
    "required": ["city"],
}
FUNCTIONS = (FunctionSignature("weather", SCHEMA), FunctionSignature("now"))
DEEP = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
ROME = {"city": "Rome"}
REPLIES: dict[str, tuple[str, list[tuple[str, Any]]]] = {
    "hermes": (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Ro\\"}me", "days": 3}}\n'
        '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        [("weather", {"city": 'Ro"}me', "days": 3}), ("now", {})],
    ),
    "harmony": (
        "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "Rome"}<|call|>',
        [("weather", ROME)],
    ),
    "qwen3-coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nRo\nme\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        [("weather", {"city": "Ro\nme", "days": 3})],
    ),
    "glm": (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
        "<arg_key>warm</arg_key>\n<arg_value>true</arg_value>\n</tool_call>",
        [("weather", ROME | {"warm": True})],
    ),
    "mistral": (
        '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]now[ARGS]{}',
        [("weather", ROME), ("now", {})],
    ),
    "mistral-list": (
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}, '
        '{"name": "now", "arguments": {}}]',
        [("weather", ROME), ("now", {})],
    ),
    "deepseek-v3": (
        f'{DEEP}function<｜tool▁sep｜>weather\n```json\n{{"city": "Rome"}}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [("weather", ROME)],
    ),
    "deepseek": (
        f'{DEEP}weather<｜tool▁sep｜>{{"city": "Rome"}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        [("weather", ROME)],
    ),
    "gemma": (
        '<|tool_call>call:weather{city:<|"|>Ro:me, {x}<|"|>,days:3}<tool_call|>',
        [("weather", {"city": "Ro:me, {x}", "days": 3})],
    ),
    "lfm2": (
        '<|tool_call_start|>[weather(city="Rome", warm=True), now()]<|tool_call_end|>',
        [("weather", ROME | {"warm": True}), ("now", {})],
    ),
    "llama-json": (
        '{"name": "weather", "parameters": {"city": "Rome"}}; {"name": "now", "parameters": {}}',
        [("weather", ROME), ("now", {})],
    ),
    "llama-pythonic": (
        '[weather(city="Rome", days=2), now()]',
        [("weather", ROME | {"days": 2}), ("now", {})],
    ),
}
SPECIALS = [
    *("<eos>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|end|>", "<|start|>"),
    *("<|tool_call_start|>", "<|tool_call_end|>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call>"),
    *("<tool_call|>", '<|"|>', "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<|return|>", "[THINK]", "[/THINK]"),
]
NAMES = [each.name for each in REPLY_FORMATS]


@lru_cache
def tokenizer() -> Tokenizer:
    """Bytes, and the special tokens of the models that write these formats."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={x: i for i, x in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return made


@lru_cache
def lexicon() -> LLTokenizer:
    return LLTokenizer(tokenizer().to_str(), eos_token=tokenizer().token_to_id("<eos>"))


def follows(
    name: str,
    wish: ReplyRequirements,
    text: str,
    thinking: ThinkingMode = "no",
    plain: str | None = None,
) -> bool:
    """Tell whether a reply follows the grammar of a wish, to an end."""
    format = get_format(name)
    ids = {each: tokenizer().token_to_id(each) for each in SPECIALS if each in format.literals}
    grammar = GrammarWriter(format, wish, ids, plain).write(thinking)
    matcher = LLMatcher(lexicon(), LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), f"{grammar}\n{matcher.get_error()}"
    tokens = tokenizer().encode(text).ids
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def read(
    name: str,
    pieces: list[str],
    functions: tuple[FunctionSignature, ...] = FUNCTIONS,
    prompt: str = "",
    *,
    cut: str | None = None,
    has_text: bool = True,
) -> tuple[str, str, list[tuple[str, str]]]:
    """A reply's text, thoughts and calls."""
    regions = build_format_regions(get_format(name), calls=bool(functions), thoughts=True)
    known = {each.name: each for each in functions}
    reader = ReplyReader(regions, known, find_open_region(regions, prompt), has_text=has_text)
    told: list[ReplyEvent] = [new for piece in pieces for new in reader.feed(piece)]
    told += reader.feed("", last=True, cut=cut)
    calls: dict[int, list[str]] = {}
    for each in (each for each in told if each.call is not None):
        assert each.call is not None and bool(each.name) == (each.call not in calls)
        calls.setdefault(each.call, [each.name, ""])[1] += each.arguments
    text, thoughts = ("".join(getattr(each, part) for each in told) for part in ("text", "thought"))
    return text, thoughts, [(name, arguments) for name, arguments in calls.values()]


def parsed(calls: list[tuple[str, str]]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("name", NAMES)
def test_a_reply_is_read_however_it_is_cut(name: str) -> None:
    reply, calls = REPLIES[name]
    around = "" if get_format(name).starts_unmarked else "Well, <b> {x}"
    whole = around + reply
    for cut in range(len(whole) + 1):
        text, thoughts, made = read(name, [whole[:cut], whole[cut:]])
        assert (text, thoughts, parsed(made)) == (around, "", calls)
    assert parsed(read(name, list(whole))[2]) == calls


@pytest.mark.parametrize("name", NAMES)
def test_marks_of_a_reply_that_is_cut_are_no_text(name: str) -> None:
    """Cut anywhere by a limit, with text before the calls and where there is none, whole and letter
    by letter: calls that are whole are told, and of the last one its beginning at most."""
    reply, calls = REPLIES[name]
    for lead in ("", "Well. ") if not get_format(name).starts_unmarked else ("",):
        told = 0
        for cut in range(len(reply) + 1):
            text, thoughts, made = read(name, [lead + reply[:cut]], cut="")
            assert (text.rstrip(), thoughts) == (lead.rstrip(), "")
            assert read(name, list(lead + reply[:cut]), cut="") == (text, thoughts, made)
            assert read(name, [reply[:cut]], cut="", has_text=False)[0] == ""
            whole = [call for call, each in zip(calls, made, strict=False) if is_json(each[1])]
            assert parsed(made[: len(whole)]) == whole and len(made) - len(whole) <= 1
            assert len(whole) >= told  # none is lost when more follows
            told = len(whole)
        assert told == len(calls)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def test_text_that_is_cut_keeps_what_begins_no_mark() -> None:
    assert read("hermes", ["I want \n"], cut="")[0] == "I want \n"
    assert read("harmony", ["I want to"], cut="")[0] == "I want to"
    assert read("hermes", ["a <"], cut="")[0] == "a"  # it may be one
    assert read("hermes", ["a <"])[0] == read("hermes", ["a <"], cut="\n")[0] == "a <"
    assert read("hermes", ["a <tool"], cut="_call")[0] == "a"  # a stop string within a mark
    assert read("hermes", ["<think>\nA </thi"], cut="") == ("", "\nA </thi", [])
    reply = REPLIES["hermes"][0]
    assert read("hermes", [reply[: reply.index("</")]], cut="</")[0] == ""
    begun = '<tool_call>\n{"name": "weather", "arguments": {"city": "a <'
    assert read("hermes", [begun], cut="")[2] == [("weather", '{"city": "a <')]


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_reply_follows_the_grammar(name: str) -> None:
    format, (reply, calls) = get_format(name), REPLIES[name]
    text = f"{format.text_mark}Plain [words] {{only}}."
    every, forced = ReplyRequirements(FUNCTIONS), ReplyRequirements(FUNCTIONS, required=True)
    assert follows(name, forced, reply) and follows(name, every, reply)
    assert follows(name, every, text) and not follows(name, forced, text)
    if not (format.starts_unmarked or format.text_mark):
        assert follows(name, every, f"Well. {reply}")
    one = ReplyRequirements(FUNCTIONS, required=True, parallel=False)
    assert follows(name, one, reply) == (len(calls) == 1)
    # the mark of a call, and then none: only text that begins no call is free
    begun = reply[: reply.index("weather")] + "wea_" + reply[reply.index("weather") + 4 :]
    assert not follows(name, every, begun)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_a_broken_reply_is_lost(name: str) -> None:
    """10,000 replies are cut, doubled or stirred: no exception, and all of them is told: text
    letter by letter, and calls as JSON, or as the pieces that were streamed."""
    rng = random.Random(name)
    reply = REPLIES[name][0]
    for _ in range(10_000 // len(NAMES)):
        letters = list(reply)
        for _ in range(rng.randrange(3)):
            at = rng.randrange(len(letters))
            letters[at : at + rng.randrange(4)] = rng.choice(
                ['"', "{", "}", "<", "\n", "[", "", "é"]
            )
        broken = "".join(letters)[: rng.randrange(len(letters) + 2)]
        at = rng.randrange(len(broken) + 1)
        whole = read(name, [broken])
        assert read(name, [broken[:at], broken[at:]]) == whole
        text, _, made = whole
        if not made:
            dropped = [
                x
                for x in (
                    *get_format(name).dropped_marks,
                    get_format(name).before,
                    get_format(name).after,
                )
                if x
            ]
            left, kept = broken, text
            for mark in dropped:
                left, kept = left.replace(mark, ""), kept.replace(mark, "")
            assert kept.replace("\n", "") == left.replace("\n", "")


def test_thoughts_are_told_apart() -> None:
    reply = "<think>\nA <tool_call>?</think>\n\nYes."
    for cut in range(len(reply)):
        assert read("hermes", [reply[:cut], reply[cut:]]) == ("Yes.", "\nA <tool_call>?", [])
    begun = "A</think>\n\nYes."
    assert read("hermes", [begun], prompt="<|im_start|>assistant\n<think>\n") == ("Yes.", "A", [])
    assert read("hermes", [begun], prompt="<think>x</think> again")[:2] == (begun, "")
    reply = "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>final<|message|>Yes"
    assert read("harmony", [reply]) == ("Yes", "A", [])
    assert parsed(
        read("harmony", [reply[: reply.index("<|channel|>final")] + REPLIES["harmony"][0]])[2]
    )


def test_a_grammar_holds_behind_thoughts() -> None:
    reply = REPLIES["hermes"][0]
    forced, json_only = (
        ReplyRequirements(FUNCTIONS, required=True),
        build_json_rule({"type": "object"}),
    )
    assert follows("hermes", forced, f"<think>hm</think>\n\n{reply}", "may")
    assert follows("hermes", forced, reply, "may")
    assert follows("hermes", forced, f"hm</think>\n\n{reply}", "begun")
    assert not follows("hermes", forced, f"<think>hm</think>{reply}", "no")
    assert follows("hermes", ReplyRequirements(), 'hm</think>\n\n{"a": 1}', "begun", json_only)
    assert not follows("hermes", ReplyRequirements(), "hm</think>\n\nhm", "begun", json_only)
    assert follows("hermes", ReplyRequirements(FUNCTIONS), '{"a": 1}', "no", json_only)


def test_templates_tell_their_formats() -> None:
    marks = {each.name: " ".join(each.template_marks) for each in REPLY_FORMATS}
    assert {name: find_format(text) and find_format(text).name for name, text in marks.items()} == {
        name: name for name in marks
    }  # pyright: ignore
    assert find_format("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}") is None


@pytest.mark.parametrize("name", ["qwen3-coder", "gemma", "lfm2"])
def test_a_schema_that_a_form_cannot_hold_to_is_named(name: str) -> None:
    several = FunctionSignature("f", {"type": "object", "anyOf": [{"required": ["a"]}]})
    with pytest.raises(
        InputError, match="the function 'f' cannot be called .* supports properties only"
    ):
        GrammarWriter(get_format(name), ReplyRequirements((several,)), {}).write("no")
    if name != "lfm2":  # whose strings are JSON
        short = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}}
        with pytest.raises(InputError, match="cannot have maxLength"):
            GrammarWriter(
                get_format(name), ReplyRequirements((FunctionSignature("f", short),)), {}
            ).write("no")


def test_a_function_takes_the_arguments_that_it_names() -> None:
    """Others only where its schema has a word about them."""
    opened = SCHEMA | {"additionalProperties": True}
    text = '<tool_call>\n{"name": "f", "arguments": {"city": "Rome", "more": 1}}\n</tool_call>'
    for schema, good in ((SCHEMA, False), (opened, True)):
        wish = ReplyRequirements((FunctionSignature("f", schema),), required=True, parallel=False)
        assert follows("hermes", wish, text) is good


def test_some_arguments_may_be_left_out() -> None:
    for reply, good in (
        ('[weather(city="Rome")]', True),
        ('[weather(city="Rome", warm=False)]', True),
        ("[weather(days=1)]", False),
        ('[weather(city="Rome", days=1, warm=True)]', True),
        ('[weather(city="Rome" days=1)]', False),
        ("[now()]", True),
    ):
        assert follows("llama-pythonic", ReplyRequirements(FUNCTIONS, required=True), reply) == good
    free = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    wish = ReplyRequirements((FunctionSignature("f", free),), required=True)
    for inner in ("", "a=1", "b=1", "a=1, b=2"):
        assert follows("llama-pythonic", wish, f"[f({inner})]")
    assert not follows("llama-pythonic", wish, "[f(a=1, )]")
    assert HERMES_FORMAT.name == "hermes"


@pytest.mark.parametrize("mark", ["</tool_call>", "</parameter>", "\n</parameter>", "[TOOL_CALLS]"])
@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "mistral", "lfm2", "llama-json"])
def test_marks_within_strings_end_no_call(name: str, mark: str) -> None:
    """A forced call may hold them where its form has quotes; else the grammar lets none through."""
    schema = {"type": "object", "properties": {"city": {"const": f"x{mark}y"}}}
    function = FunctionSignature("f", schema | {"required": ["city"]})
    given = json.dumps({"city": f"x{mark}y"})
    reply = {
        "hermes": f'<tool_call>\n{{"name": "f", "arguments": {given}}}\n</tool_call>',
        "mistral": f"[TOOL_CALLS]f[ARGS]{given}",
        "lfm2": f"<|tool_call_start|>[f(city={json.dumps(f'x{mark}y')})]<|tool_call_end|>",
        "llama-json": f'{{"name": "f", "parameters": {given}}}',
        "qwen3-coder": "<tool_call>\n<function=f>\n<parameter=city>\nx"
        f"{mark}y\n</parameter>\n</function>\n</tool_call>",
    }[name]
    if name == "qwen3-coder":
        free = {"type": "object", "properties": {"city": {"type": "string"}}}
        free_wish = ReplyRequirements(
            (FunctionSignature("f", free | {"required": ["city"]}),), required=True
        )
        held = "parameter" not in mark and mark not in SPECIALS  # which are no part of a text
        assert follows(name, free_wish, reply) == held
        if "parameter" in mark:
            return
    elif mark not in SPECIALS:
        assert follows(name, ReplyRequirements((function,), required=True), reply)
    assert parsed(read(name, [reply], (function,))[2]) == [("f", {"city": f"x{mark}y"})]
    for cut in range(0, len(reply), 3):
        assert parsed(read(name, [reply[:cut], reply[cut:]], (function,))[2])


def test_marks_in_messages_begin_no_thoughts() -> None:
    regions = build_format_regions(HERMES_FORMAT, calls=False, thoughts=True)
    asked = "<|im_start|>user\nIs <think> a tag?<|im_end|>\n<|im_start|>assistant\n"
    assert find_open_region(regions, asked) is None
    assert find_open_region(regions, f"{asked}<think>\n") is not None


def test_one_call_at_most() -> None:
    first, second = REPLIES["hermes"][0].split("\n<tool_call>")
    one = ReplyRequirements(FUNCTIONS, parallel=False)
    assert follows("hermes", one, first) and follows("hermes", one, f"So: {first}")
    assert not follows("hermes", one, f"{first}\n<tool_call>{second}")
    assert not follows("hermes", one, f"{first}\n<tool_call>x</tool_call>")


def test_a_structure_stands_behind_the_mark_of_text() -> None:
    only = build_json_rule({"type": "object"})
    final = "<|channel|>final<|message|>{}"
    thought = "<|channel|>analysis<|message|>A<|end|><|start|>assistant"
    for wish in (ReplyRequirements(), ReplyRequirements(FUNCTIONS)):
        assert follows("harmony", wish, final, "may", only)
        assert follows("harmony", wish, f"{thought}{thought}{final}", "may", only)
        assert not follows("harmony", wish, "{}", "may", only)


def test_halves_of_characters_stay_escapes_and_text_behind_the_arguments_is_kept() -> None:
    halves = '<tool_call>{"name": "now", "arguments": "{\\"a\\": \\"\\\\ud800\\"}"}</tool_call>'
    assert read("hermes", [halves])[2] == [("now", '{"a": "\\ud800"}')]
    reply = '<tool_call>{"name": "now", "arguments": {}} and more</tool_call>'
    text, _, calls = read("hermes", [reply])
    assert calls == [("now", "{}")] and "and more" in text
    answer = '{"name": "Anna", "age": 3}'  # JSON that is no call
    assert read("llama-json", [answer]) == (answer, "", [])


def test_blanks_cost_no_time() -> None:
    """Text comes in pieces of a letter: 4,000 took minutes where every piece was searched anew
    from both ends."""
    regions = build_format_regions(get_format("llama-json"), calls=True, thoughts=True)
    reader = ReplyReader(regions, {}, None)
    told = [new for _ in range(4000) for new in reader.feed(" ")] + reader.feed("x", last=True)
    assert "".join(each.text for each in told) == " " * 4000 + "x"


@pytest.mark.parametrize("body", ["[1]", '"x"', "[]", '{"name": null, "arguments": null}', "{"])
def test_a_response_template_that_finds_no_call_leaves_text(body: str) -> None:
    template = {
        "start_anchor": "<a>",
        "fields": {
            "tool_calls": {"open": "<C>", "close": "</C>", "content": "json", "repeats": True},
            "reasoning_content": {"open": "<T>", "close": "</T>"},
            "content": {"close": "<end>"},
        },
    }
    regions = build_template_regions(template, calls=True)
    for reply, expected in (
        (f"Hi <C>{body}</C>", (f"Hi <C>{body}</C>", "", [])),
        (
            '<T>A</T>Hi<C>{"name": "f", "arguments": {"a": 1}}</C><end>',
            ("Hi", "A", [("f", {"a": 1})]),
        ),
    ):
        for cut in range(len(reply)):
            reader = ReplyReader(regions, {}, None)
            told = reader.feed(reply[:cut]) + reader.feed(reply[cut:]) + reader.feed("", last=True)
            calls = [(x.name, json.loads(x.arguments)) for x in told if x.call is not None]
            text, thought = (
                "".join(getattr(x, part) for x in told) for part in ("text", "thought")
            )
            assert (text, thought, calls) == expected
