"""Encode chat messages as token ids with a chat template: the tokenizer's, or one from the caller.

The template produces the whole prompt: no special tokens are added to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch
from jinja2 import Environment, TemplateError, meta

from foretoken.errors import InputError, format_value, name_option_in_errors, to_one_line
from foretoken.media.audio import load_audio
from foretoken.media.images import load_image
from foretoken.text.messages import (
    MEDIA_PART_KEYS,
    UNSUPPORTED_PARTS,
    Message,
    get_parts,
    require_conversation,
)
from foretoken.text.templates import accepts_parts, accepts_strings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHAT_ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # of OpenAI's API

# Arguments of transformers' `apply_chat_template` that are not passed to the template
TRANSFORMERS_ARGUMENTS = frozenset(
    "conversation chat_template tokenize padding truncation max_length return_tensors return_dict "
    "return_assistant_tokens_mask tokenizer_kwargs".split()
)

# Kinds of media, and the attributes of processors that support them
MEDIA_PROCESSOR_ATTRIBUTES = {
    "image": ("image_processor",),
    "audio": ("feature_extractor", "audio_processor"),
}
# Refused arguments of processors: with them a client could load any file or URL
PROCESSOR_ARGUMENTS = frozenset("images videos audio audios text processor_kwargs device".split())
TEMPLATE_ARGUMENTS = frozenset(
    "tools documents add_generation_prompt continue_final_message".split()
)
DEFAULT_SAMPLING_RATE = 16_000  # Hz, for processors that specify none


def encode_chat(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase | None,
    template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the token ids of a conversation, up to the beginning of the assistant's next message.

    `template`: Jinja source or the name of a template of the tokenizer; None: the tokenizer's own.
    `chat_template_kwargs`: variables of the template, and options of transformers: "tools",
    "documents", "add_generation_prompt", "continue_final_message" to continue the last message, and
    "sanitize_control_tokens" to encode names of special tokens in messages as plain text.
    Raises InputError if the conversation cannot be rendered.
    """
    if tokenizer is None:
        raise InputError("messages need a tokenizer, and there is none; give token ids instead")
    require_conversation(messages)
    source = _get_template_source(tokenizer, template)
    with name_option_in_errors("chat_template_kwargs"):
        variables = _get_template_variables(chat_template_kwargs)
    resolved = _resolve_template(tokenizer, template, variables)
    for i, message in enumerate(messages):
        _require_role(i, message["role"], source)
    _require_parts(messages, source)
    try:
        rendered = tokenizer.apply_chat_template(
            [_normalize_message(message, resolved) for message in messages],
            chat_template=template,
            tokenize=True,
            return_dict=False,
            tokenizer_kwargs={"verbose": False},  # no warning: the caller checks the prompt length
            **variables,
        )
    except ImportError as error:  # jinja2, a dependency of torch, is missing or too old
        raise InputError(f"messages cannot be rendered: {to_one_line(error)}") from None
    except Exception as error:  # a template is a program
        raise InputError(f"the chat template refuses the messages: {to_one_line(error)}") from None
    if not rendered:
        raise InputError(
            "the chat template renders no output for the messages; give another template"
        )
    return cast(list[int], rendered)


def _get_template_source(tokenizer: PreTrainedTokenizerBase, template: str | None) -> str:
    """Return the source of the template to use. If `template` is None and the tokenizer has several
    named templates, return the joined sources of all of them. Raises InputError if there is no
    template or `template` is invalid."""
    own = getattr(tokenizer, "chat_template", None)
    named = own if isinstance(own, Mapping) else {}
    if template is None:
        if not own:
            raise InputError(
                "the tokenizer has no chat template; give chat_template=... "
                "(--chat-template FILE), or a prompt as text"
            )
        return "\n".join(map(str, named.values())) if named else str(own)
    if not isinstance(template, str):
        raise InputError(f"chat_template is {format_value(template)}; give Jinja source")
    if "{" not in template and template not in named:
        alternatives = f", or one of {', '.join(named)}" if named else ""
        raise InputError(
            f"chat_template is {format_value(template)}, which is not a template; give the "
            f"source of a Jinja template{alternatives}"
        )
    return str(named.get(template, template))


def _resolve_template(owner: Any, template: str | None, variables: Mapping[str, Any]) -> str:
    """Return the source of the template that transformers uses. If the tokenizer or processor has
    several named templates, transformers selects one by name."""
    own = getattr(owner, "chat_template", None)
    named = own if isinstance(own, Mapping) else {}
    if template is None and named:
        template = "tool_use" if variables.get("tools") and "tool_use" in named else "default"
    return str(named.get(template, template or own))


def _require_role(i: int, role: str, source: str) -> None:
    """Raise InputError for a role that is neither in OpenAI's API nor named in the template."""
    if role not in CHAT_ROLES and not any(f"{mark}{role}{mark}" in source for mark in "'\""):
        problem = (
            f"message {i} has the role {format_value(role)}; give one of {', '.join(CHAT_ROLES)}"
        )
        raise InputError(problem).with_option(f"prompt[{i}].role")


def _require_parts(
    messages: Sequence[Message], source: str, media_kinds: Sequence[str] | None = None
) -> None:
    """Raise InputError for a part whose type the template would leave out or the processor does not
    support. `media_kinds`: kinds of media that the processor supports; None without a processor."""
    for i, message in enumerate(messages):
        for j, part in enumerate(get_parts(message)):
            kind, label = part.get("type"), f"message {i}, part {j}"
            if kind in MEDIA_PART_KEYS and media_kinds is not None and kind not in media_kinds:
                accepted = " and ".join(("text", *media_kinds))
                raise InputError(f"{label} is of the type {kind}; the model takes {accepted}")
            if (
                kind in (None, "text", *MEDIA_PART_KEYS, *UNSUPPORTED_PARTS)
                or f"'{kind}'" in source
            ):
                continue
            if f'"{kind}"' not in source:
                raise InputError(
                    f"{label} has the type {format_value(kind)}, which the chat template "
                    "does not support; leave it out"
                )


def _normalize_message(message: Message, template: str) -> dict[str, Any]:
    """Return a message in the form that the template supports.

    A missing content becomes "". A string becomes a text part if the template accepts only parts,
    and text parts become a string if the template accepts only strings. JSON in the arguments of
    tool calls is parsed. (transformers leaves out fields that are null.)
    """
    plain = {**message, "content": ""} if message.get("content") is None else dict(message)
    parts = get_parts(plain)
    if isinstance(plain["content"], str) and not accepts_strings(template):
        plain["content"] = [{"type": "text", "text": plain["content"]}]
    elif not isinstance(plain["content"], str) and accepts_parts(template) is False:
        if all("text" in part for part in parts) and accepts_strings(template):
            plain["content"] = "".join(str(part["text"]) for part in parts)
    calls = message.get("tool_calls")
    if isinstance(calls, list | tuple):
        plain["tool_calls"] = [_parse_call_arguments(call) for call in cast(list[Any], calls)]
    return plain


def _parse_call_arguments(call: Any) -> Any:
    try:
        arguments = json.loads(call["function"]["arguments"])
        assert isinstance(arguments, dict)
        return {**call, "function": {**call["function"], "arguments": arguments}}
    except (TypeError, LookupError, ValueError, AssertionError):  # it may be invalid JSON
        return call


def _get_template_variables(arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the template's variables other than the messages: the caller's, and
    `add_generation_prompt` unless the caller sets it or continues the last message."""
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping) or not all(isinstance(name, str) for name in arguments):
        raise InputError(
            f"chat_template_kwargs is {format_value(arguments)}; give a dict of names to values"
        )
    foreign = sorted(TRANSFORMERS_ARGUMENTS & arguments.keys())
    if foreign:
        raise InputError(
            f"chat_template_kwargs has {foreign[0]!r}, which no template uses; leave it out"
        )
    return {"add_generation_prompt": not arguments.get("continue_final_message"), **arguments}


def process_media_chat(
    messages: Sequence[Message],
    processor: Any,
    template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Mapping[str, Any]:
    """Return the model's inputs, by name, that a processor makes from a conversation with images
    and audio. The prompt ends where the assistant's next message begins.

    `template`, `chat_template_kwargs`: see `encode_chat`. Raises InputError if media cannot be
    loaded or the messages cannot be rendered.
    """
    require_conversation(messages)
    with name_option_in_errors("chat_template_kwargs"):
        variables = _get_template_variables(chat_template_kwargs)
    owner = processor if getattr(processor, "chat_template", None) else processor.tokenizer
    source, resolved = (
        _get_template_source(owner, template),
        _resolve_template(owner, template, variables),
    )
    sampling_rate = get_sampling_rate(processor)
    _require_parts(messages, source, get_media_kinds(processor))
    loaded = [
        _load_media(i, message, sampling_rate, resolved) for i, message in enumerate(messages)
    ]
    if taken := sorted(PROCESSOR_ARGUMENTS & variables.keys()):
        raise InputError(
            f"chat_template_kwargs has {taken[0]!r}, an argument of the processor; leave it out"
        ).with_option("chat_template_kwargs")
    variable_names = _find_variable_names(source)  # transformers passes others to the processor
    variables = {name: value for name, value in variables.items() if name in variable_names}

    def render(messages: list[dict[str, Any]]) -> Mapping[str, Any]:
        try:
            if not _has_media_marks(messages, resolved, processor):
                return _process_with_marks(messages, processor, resolved, variables)
            return processor.apply_chat_template(
                messages,
                chat_template=resolved,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
                **variables,
            )
        except Exception as error:  # a template is a program
            raise InputError(f"the processor refuses the messages: {to_one_line(error)}") from None

    inputs = render(loaded)
    _require_whole_audio(loaded, inputs, render, processor)
    return inputs


def _require_whole_audio(
    messages: list[dict[str, Any]],
    inputs: Mapping[str, Any],
    render: Callable[[list[dict[str, Any]]], Mapping[str, Any]],
    processor: Any,
) -> None:
    """Raise InputError if the processor drops the end of an audio clip: if it makes the same inputs
    from audio cut to the length to which its feature extractor pads."""
    max_samples = getattr(getattr(processor, "feature_extractor", None), "n_samples", None) or 0
    audio = [part["audio"] for each in messages for part in get_parts(each) if "audio" in part]
    longest = max(map(len, audio), default=0)
    if not max_samples or longest <= max_samples:
        return
    cut = [dict(message) for message in messages]
    for message in cut:
        if parts := get_parts(message):
            ends = (
                {"audio": part["audio"][:max_samples]} if "audio" in part else {} for part in parts
            )
            message["content"] = [{**part, **end} for part, end in zip(parts, ends, strict=True)]
    cut_inputs = render(cut)
    if all(
        torch.equal(x, cut_inputs[name])
        for name, x in inputs.items()
        if isinstance(x, torch.Tensor)
    ):
        sampling_rate = get_sampling_rate(processor)
        raise InputError(
            f"the audio lasts {longest / sampling_rate:.0f} s, but the model takes only the first "
            f"{max_samples / sampling_rate:.0f} s; cut the audio into pieces, or use transcribe"
        )


def _has_media_marks(messages: list[dict[str, Any]], template: str, processor: Any) -> bool:
    """Return whether the template writes placeholders for these messages' media, or the processor
    has no placeholder tokens to insert."""
    kinds_of = {str(part.get("type")) for each in messages for part in get_parts(each)}
    kinds_of &= MEDIA_PART_KEYS.keys()
    return all(
        accepts_parts(template, kind) is not False or not getattr(processor, f"{kind}_token", None)
        for kind in kinds_of
    )


def _process_with_marks(
    messages: list[dict[str, Any]], processor: Any, template: str, variables: dict[str, Any]
) -> Mapping[str, Any]:
    """Return the inputs of `process_media_chat` for a template without placeholders for media
    (Granite Speech's): insert the processor's placeholder tokens in the text and pass the media to
    the processor."""
    given: dict[str, list[Any]] = {kind: [] for kind in MEDIA_PART_KEYS}
    written: list[dict[str, Any]] = []
    for message in messages:
        content = message["content"]
        if not isinstance(content, str):
            content = ""
            for part in get_parts(message):
                kind = part.get("type")
                content += (
                    getattr(processor, f"{kind}_token") if kind in MEDIA_PART_KEYS else part["text"]
                )
                if kind in MEDIA_PART_KEYS:
                    given[kind].append(part[kind])
        written.append(_normalize_message({**message, "content": content}, template))
    text = processor.tokenizer.apply_chat_template(
        written, chat_template=template, tokenize=False, **variables
    )
    begun = processor.tokenizer.bos_token
    named = {"images": given["image"], "audio": given["audio"]}
    return processor(
        text=[text],
        add_special_tokens=not (begun and text.startswith(begun)),
        return_tensors="pt",
        **{name: values for name, values in named.items() if values},
    )


def get_sampling_rate(processor: Any) -> int:
    """Return the sampling rate in Hz of the audio that a processor takes."""
    rates = (
        getattr(getattr(processor, n, None), "sampling_rate", None)
        for n in MEDIA_PROCESSOR_ATTRIBUTES["audio"]
    )
    return next(filter(None, rates), DEFAULT_SAMPLING_RATE)


def get_media_kinds(processor: Any) -> tuple[str, ...]:
    """Return the kinds of media that a processor takes in messages."""
    return tuple(
        kind
        for kind, parts in MEDIA_PROCESSOR_ATTRIBUTES.items()
        if any(getattr(processor, p, None) for p in parts)
    )


@lru_cache(16)
def _find_variable_names(source: str) -> frozenset[str]:
    """Return the names of the variables that a template uses or that transformers itself uses."""
    try:
        extensions = ["jinja2.ext.loopcontrols", "jinja2.ext.do"]
        variable_names = meta.find_undeclared_variables(
            Environment(extensions=extensions).parse(source)
        )
    except TemplateError:  # the template has tags that only transformers defines
        variable_names = set[str]()
    return TEMPLATE_ARGUMENTS | variable_names


def _load_media(i: int, message: Message, sampling_rate: int, template: str) -> dict[str, Any]:
    plain = _normalize_message(message, template)
    if parts := get_parts(message):
        numbered = enumerate(parts)
        plain["content"] = [
            _load_part(f"message {i}, part {j}", part, sampling_rate) for j, part in numbered
        ]
    return plain


def _load_part(label: str, part: Mapping[str, Any], sampling_rate: int) -> dict[str, Any]:
    kind = part.get("type")
    if kind in UNSUPPORTED_PARTS:
        raise InputError(f"{label} is {UNSUPPORTED_PARTS[kind]}")
    if kind not in MEDIA_PART_KEYS:
        return dict(part)
    values = [part[name] for name in MEDIA_PART_KEYS[kind] if part.get(name) is not None]
    if len(values) != 1:
        names = ", ".join(MEDIA_PART_KEYS[kind])
        raise InputError(f"{label} has {len(values)} of {names}; give exactly one of them")
    value = (
        load_image(values[0], label)
        if kind == "image"
        else load_audio(values[0], sampling_rate, label)
    )
    return {"type": kind, kind: value}
