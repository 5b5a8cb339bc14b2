"""The supported formats of replies with reasoning and tool calls, and which of them a chat template
uses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any, cast

from foretoken.text.replies.calls import (
    BareKeysForm,
    CallForm,
    JsonForm,
    NamedForm,
    PythonForm,
    TaggedForm,
)

THINK_MARKS = ("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """A format of replies: the syntax of calls (`form`), and the marks around reasoning and calls.
    Forced calls are generated with `open` and `close`; the parser of replies uses `open_pattern`
    and `close_pattern`, which match variants of these marks too."""

    name: str
    form: CallForm
    open: str = ""  # before the calls of a region
    close: str = ""
    open_pattern: str = ""  # a regular expression; "": matches `open`
    close_pattern: str = ""
    before: str = ""  # before the first region; `after`: after the last
    after: str = ""
    region_separator: str | None = "\n"  # between regions; None: a reply has one region
    call_separator: str | None = None  # between calls of a region; None: a region has one call
    region_brackets: tuple[str, str] = ("", "")  # around all calls of a region
    think: tuple[str, str] = THINK_MARKS
    dropped_marks: tuple[str, ...] = ()  # removed from the text
    template_marks: tuple[str, ...] = ()  # a chat template with all of these uses the format
    starts_unmarked: bool = False  # whether calls begin at the start of the reply, without a mark
    text_mark: str = ""  # before the text for the user
    resume_mark: str = ""  # after reasoning, if more than whitespace must follow

    @property
    def literals(self) -> str:
        """Return all strings of the format that may contain special tokens."""
        return "\0".join(_iter_strings(astuple(self)))


def _iter_strings(part: Any) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    elif isinstance(part, tuple):
        for each in cast(tuple[Any, ...], part):
            yield from _iter_strings(each)


HERMES_FORMAT = ReplyFormat(
    "hermes",
    JsonForm(),
    "<tool_call>\n",
    "\n</tool_call>",
    r"\s*<tool_call>",
    r"\s*</tool_call>",
    template_marks=("<tool_call>",),
)
# If a template matches several formats, the first one is used
REPLY_FORMATS = (
    ReplyFormat(
        "harmony",
        NamedForm(
            " <|constrain|>json<|message|>", pattern=r"\s*([\w.:-]+).*?<\|message\|>\s*(?=\{)"
        ),
        "<|channel|>commentary to=functions.",
        "<|call|>",
        r"(?:<\|start\|>assistant)?(?:<\|channel\|>(?:commentary|analysis))? ?to=functions\.",
        r"<\|call\|>",
        region_separator=None,
        think=("<|channel|>analysis<|message|>", "<|end|>"),
        dropped_marks=(
            "<|start|>assistant",
            "<|channel|>final<|message|>",
            "<|channel|>commentary<|message|>",
            "<|end|>",
            "<|return|>",
        ),
        template_marks=("<|channel|>", "<|constrain|>"),
        text_mark="<|channel|>final<|message|>",
        resume_mark="<|start|>assistant",
    ),
    ReplyFormat(
        "qwen3-coder",
        TaggedForm(
            ("<function=", ">\n"), ("<parameter=", ">\n"), "\n</parameter>\n", "</function>"
        ),
        "<tool_call>\n",
        "\n</tool_call>",
        r"\s*<tool_call>",
        r"\s*</tool_call>",
        template_marks=("<tool_call>", "<function="),
    ),
    ReplyFormat(
        "glm",
        TaggedForm(("", "\n"), ("<arg_key>", "</arg_key>\n<arg_value>"), "</arg_value>\n"),
        "<tool_call>",
        "</tool_call>",
        r"\s*<tool_call>",
        r"\s*</tool_call>",
        template_marks=("<tool_call>", "<arg_key>"),
    ),
    HERMES_FORMAT,
    ReplyFormat(
        "mistral",
        NamedForm("[ARGS]"),
        "[TOOL_CALLS]",
        close_pattern=r"(?=\[TOOL_CALLS\])",
        region_separator="",
        think=("[THINK]", "[/THINK]"),
        template_marks=("[TOOL_CALLS]", "[ARGS]"),
    ),
    ReplyFormat(
        "mistral-list",
        JsonForm(),
        "[TOOL_CALLS] ",
        open_pattern=r"\[TOOL_CALLS\]\s*",
        region_separator=None,
        call_separator=", ",
        region_brackets=("[", "]"),
        template_marks=("[TOOL_CALLS]",),
    ),
    ReplyFormat(
        "deepseek-v3",
        NamedForm("\n```json\n", "function<｜tool▁sep｜>", "\n```"),
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        before="<｜tool▁calls▁begin｜>",
        after="<｜tool▁calls▁end｜>",
        template_marks=("<｜tool▁call▁begin｜>", "```json"),
    ),
    ReplyFormat(
        "deepseek",
        NamedForm("<｜tool▁sep｜>"),
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        before="<｜tool▁calls▁begin｜>",
        after="<｜tool▁calls▁end｜>",
        region_separator="",
        template_marks=("<｜tool▁call▁begin｜>",),
    ),
    ReplyFormat(
        "gemma",
        BareKeysForm(),
        "<|tool_call>",
        "<tool_call|>",
        region_separator="",
        think=("<|channel>thought\n", "<channel|>"),
        template_marks=("<|tool_call>", "call:"),
    ),
    ReplyFormat(
        "lfm2",
        PythonForm(),
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        region_separator=None,
        call_separator=", ",
        region_brackets=("[", "]"),
        template_marks=("<|tool_call_start|>",),
    ),
    ReplyFormat(
        "llama-json",
        JsonForm("parameters", ";"),
        open_pattern=r'\A\s*(?:<\|python_tag\|>\s*)?(?=\{\s*"name")',
        region_separator=None,
        call_separator="; ",
        template_marks=('"parameters"', '{"name": '),
        starts_unmarked=True,
    ),
    ReplyFormat(
        "llama-pythonic",
        PythonForm(),
        open_pattern=r"\A\s*(?:<\|python_start\|>)?(?=\[\w[\w.]*\()",
        close_pattern=r"<\|python_end\|>",
        region_separator=None,
        call_separator=", ",
        region_brackets=("[", "]"),
        template_marks=("[func_name1(",),
        starts_unmarked=True,
    ),
)
REPLY_FORMAT_NAMES = tuple(each.name for each in REPLY_FORMATS)


def get_format(name: str) -> ReplyFormat:
    return next(each for each in REPLY_FORMATS if each.name == name)


def find_format(template: str) -> ReplyFormat | None:
    """Return the format that a chat template uses; None if it uses none of REPLY_FORMATS."""
    return next(
        (each for each in REPLY_FORMATS if all(mark in template for mark in each.template_marks)),
        None,
    )
