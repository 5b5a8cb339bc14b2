"""The formats of replies that are known, and which of them a chat template writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any, cast

from foretoken.text.replies.calls import (
    BareForm,
    CallForm,
    JsonForm,
    NamedForm,
    PythonForm,
    TaggedForm,
)

THINK = ("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """Marks around what is not for the reader. Texts of a call's surroundings are those of a
    forced call; `opens` and `closes` are read, where models vary them."""

    name: str
    form: CallForm
    open: str = ""  # before the calls of a region
    close: str = ""
    opens: str = ""  # a regular expression; "": of `open`
    closes: str = ""
    before: str = ""  # before the first region, and behind the last
    after: str = ""
    between: str | None = "\n"  # of two regions; None: a reply has one
    inside: str | None = None  # between two calls of a region; None: it has one
    around: tuple[str, str] = ("", "")  # all calls of a region
    think: tuple[str, str] = THINK
    drops: tuple[str, ...] = ()  # marks that are no part of a text
    marks: tuple[str, ...] = ()  # a chat template that holds all of these writes it
    bare: bool = False  # whether a reply of calls begins with them, without a mark
    wraps: str = ""  # before a text for the reader
    resumes: str = ""  # behind thoughts, where more than blanks must follow

    @property
    def literals(self) -> str:
        """All texts in which special tokens may stand."""
        return "\0".join(_texts(astuple(self)))


def _texts(part: Any) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    elif isinstance(part, tuple):
        for each in cast(tuple[Any, ...], part):
            yield from _texts(each)


HERMES = ReplyFormat(
    "hermes",
    JsonForm(),
    "<tool_call>\n",
    "\n</tool_call>",
    r"\s*<tool_call>",
    r"\s*</tool_call>",
    marks=("<tool_call>",),
)
# Of several whose marks a template holds, the first
FORMATS = (
    ReplyFormat(
        "harmony",
        NamedForm(
            " <|constrain|>json<|message|>", pattern=r"\s*([\w.:-]+).*?<\|message\|>\s*(?=\{)"
        ),
        "<|channel|>commentary to=functions.",
        "<|call|>",
        r"(?:<\|start\|>assistant)?(?:<\|channel\|>(?:commentary|analysis))? ?to=functions\.",
        r"<\|call\|>",
        between=None,
        think=("<|channel|>analysis<|message|>", "<|end|>"),
        drops=(
            "<|start|>assistant",
            "<|channel|>final<|message|>",
            "<|channel|>commentary<|message|>",
            "<|end|>",
            "<|return|>",
        ),
        marks=("<|channel|>", "<|constrain|>"),
        wraps="<|channel|>final<|message|>",
        resumes="<|start|>assistant",
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
        marks=("<tool_call>", "<function="),
    ),
    ReplyFormat(
        "glm",
        TaggedForm(("", "\n"), ("<arg_key>", "</arg_key>\n<arg_value>"), "</arg_value>\n"),
        "<tool_call>",
        "</tool_call>",
        r"\s*<tool_call>",
        r"\s*</tool_call>",
        marks=("<tool_call>", "<arg_key>"),
    ),
    HERMES,
    ReplyFormat(
        "mistral",
        NamedForm("[ARGS]"),
        "[TOOL_CALLS]",
        closes=r"(?=\[TOOL_CALLS\])",
        between="",
        think=("[THINK]", "[/THINK]"),
        marks=("[TOOL_CALLS]", "[ARGS]"),
    ),
    ReplyFormat(
        "mistral-list",
        JsonForm(),
        "[TOOL_CALLS] ",
        opens=r"\[TOOL_CALLS\]\s*",
        between=None,
        inside=", ",
        around=("[", "]"),
        marks=("[TOOL_CALLS]",),
    ),
    ReplyFormat(
        "deepseek-v3",
        NamedForm("\n```json\n", "function<｜tool▁sep｜>", "\n```"),
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        before="<｜tool▁calls▁begin｜>",
        after="<｜tool▁calls▁end｜>",
        marks=("<｜tool▁call▁begin｜>", "```json"),
    ),
    ReplyFormat(
        "deepseek",
        NamedForm("<｜tool▁sep｜>"),
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        before="<｜tool▁calls▁begin｜>",
        after="<｜tool▁calls▁end｜>",
        between="",
        marks=("<｜tool▁call▁begin｜>",),
    ),
    ReplyFormat(
        "gemma",
        BareForm(),
        "<|tool_call>",
        "<tool_call|>",
        between="",
        think=("<|channel>thought\n", "<channel|>"),
        marks=("<|tool_call>", "call:"),
    ),
    ReplyFormat(
        "lfm2",
        PythonForm(),
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        between=None,
        inside=", ",
        around=("[", "]"),
        marks=("<|tool_call_start|>",),
    ),
    ReplyFormat(
        "llama-json",
        JsonForm("parameters", ";"),
        opens=r'\A\s*(?:<\|python_tag\|>\s*)?(?=\{\s*"name")',
        between=None,
        inside="; ",
        marks=('"parameters"', '{"name": '),
        bare=True,
    ),
    ReplyFormat(
        "llama-pythonic",
        PythonForm(),
        opens=r"\A\s*(?:<\|python_start\|>)?(?=\[\w[\w.]*\()",
        closes=r"<\|python_end\|>",
        between=None,
        inside=", ",
        around=("[", "]"),
        marks=("[func_name1(",),
        bare=True,
    ),
)
NAMES = tuple(each.name for each in FORMATS)


def named(name: str) -> ReplyFormat:
    return next(each for each in FORMATS if each.name == name)


def of_template(template: str) -> ReplyFormat | None:
    """Return the format that a chat template writes; None where it writes none that is known."""
    return next((each for each in FORMATS if all(mark in template for mark in each.marks)), None)
