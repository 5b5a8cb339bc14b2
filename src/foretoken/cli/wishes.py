"""The options of a row's wishes, in groups as `--help` shows them: the fields of `SamplingParams`
that a command line can write down."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from foretoken.cli import files
from foretoken.errors import InputError, RefusedError, shown
from foretoken.sampling.checks import CHECKS
from foretoken.sampling.params import FIELDS, MAX_NEW_TOKENS

Text = str | None
Count = int | None
Number = float | None


def _panel(name: str) -> Callable[..., Any]:
    def option(text: str, *flags: str, many: bool = False) -> Any:
        """`many`: it may be repeated; "<list[str]>" would be too wide for the longest names."""
        metavar = "<str>" if many else None
        return Option(*flags, help=text, rich_help_panel=name, metavar=metavar)

    return option


_sampling = _panel("Sampling")
_ends = _panel("Ends")
_penalty = _panel("Penalties and bans")
_structure = _panel("Structured output")
_report = _panel("What is reported")


@dataclass(frozen=True)
class Sampling:
    """Which tokens are drawn from."""

    temperature: Annotated[float, _sampling("0 is greedy.")] = 0.0
    top_k: Annotated[int, _sampling("Draw from the so many likeliest tokens; 0 is off.")] = 0
    top_p: Annotated[
        float,
        _sampling("Draw from the likeliest tokens that together have this probability; 1 is off."),
    ] = 1.0
    min_p: Annotated[
        float,
        _sampling("Draw from tokens at least this share as likely as the likeliest; 0 is off."),
    ] = 0.0
    typical_p: Annotated[
        Number,
        _sampling(
            "Draw from the most typical tokens that together have this probability; 1 is off."
        ),
    ] = None
    epsilon_cutoff: Annotated[
        Number, _sampling("Draw from tokens of at least this probability; 0 is off.")
    ] = None
    eta_cutoff: Annotated[
        Number, _sampling("The same, with a lower bound where many tokens are likely; 0 is off.")
    ] = None


@dataclass(frozen=True)
class Several:
    """What matters where there are several texts."""

    num_return_sequences: Annotated[int, _sampling("Texts for every prompt.")] = 1
    deterministic: Annotated[
        bool,
        _sampling("A seed gives one text, whatever other prompts there are.", "--deterministic"),
    ] = False


@dataclass(frozen=True)
class Ends:
    """How long a text goes on."""

    max_new_tokens: Annotated[Count, _ends("New tokens per text at most.")] = MAX_NEW_TOKENS
    min_new_tokens: Annotated[Count, _ends("No end of sequence before so many new tokens.")] = None
    stop_strings: Annotated[
        list[str] | None,
        _ends("A string that ends the text; may be repeated.", "--stop", many=True),
    ] = None
    include_stop_string: Annotated[
        bool, _ends("Keep the string or id that ended the text in it.", "--include-stop-string")
    ] = False
    stop_token_ids: Annotated[Text, _ends("Ids that end the text, with commas between.")] = None
    ignore_eos: Annotated[bool, _ends("Go on after an end of sequence.", "--ignore-eos")] = False
    forced_eos_token_id: Annotated[
        Count, _ends("The id that the last of --max-new-tokens must be.")
    ] = None
    exponential_decay_length_penalty: Annotated[
        Text,
        _ends(
            "START,FACTOR: after START tokens the end gets likelier by FACTOR with each.",
            "--exponential-decay",  # the whole name is too wide for a terminal
        ),
    ] = None


@dataclass(frozen=True)
class Penalties:
    """What makes tokens less likely, more likely or impossible."""

    repetition_penalty: Annotated[
        Number, _penalty("Above 1: tokens that are in the prompt or text get less likely.")
    ] = None
    encoder_repetition_penalty: Annotated[
        Number, _penalty("Above 1: tokens that are in the prompt get likelier.")
    ] = None
    presence_penalty: Annotated[
        float, _penalty("Subtracted from the logits of tokens that are in the text.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, _penalty("Subtracted once for each time a token is in the text.")
    ] = 0.0
    no_repeat_ngram_size: Annotated[
        Count, _penalty("No sequence of so many tokens occurs twice.")
    ] = None
    encoder_no_repeat_ngram_size: Annotated[
        Count, _penalty("No sequence of so many tokens of the prompt occurs in the text.")
    ] = None
    bad_words_ids: Annotated[
        Text, _penalty("Sequences of ids that must not occur: [[5], [6, 7]].")
    ] = None
    sequence_bias: Annotated[
        Text, _penalty("Added to the logit that would complete a sequence: [[[6, 7], -2.5]].")
    ] = None
    logit_bias: Annotated[Text, _penalty('Added to logits of ids: {"5": -2.5}.')] = None
    suppress_tokens: Annotated[Text, _penalty("Ids that must not occur, with commas between.")] = (
        None
    )
    begin_suppress_tokens: Annotated[Text, _penalty("Ids that the text must not begin with.")] = (
        None
    )
    forced_bos_token_id: Annotated[
        Count, _penalty("The id that must follow the decoder's first.")
    ] = None
    remove_invalid_values: Annotated[
        bool, _penalty("Read NaN and infinite logits as numbers.", "--remove-invalid-values")
    ] = False


@dataclass(frozen=True)
class Structure:
    """What a text must match; at most one."""

    json_schema: Annotated[Path | None, _structure("A file with a JSON schema.")] = None
    regex: Annotated[Text, _structure("A regular expression.")] = None
    grammar: Annotated[Path | None, _structure("A file with a Lark grammar.")] = None
    choice: Annotated[
        list[str] | None, _structure("A text that is allowed; repeat it for each.", many=True)
    ] = None

    def structured(self) -> dict[str, Any] | None:
        """The value of `structured`, files read; None where nothing is asked for."""
        values = {field.name: getattr(self, field.name) for field in fields(Structure)}
        names = [name for name, value in values.items() if value not in (None, [])]
        if len(names) > 1:
            flags = " and ".join(f"--{name.replace('_', '-')}" for name in names)
            raise RefusedError(f"a text cannot follow {flags} at once; give one of them")
        if not names:
            return None
        if self.json_schema is not None:
            return {"json_schema": _schema(self.json_schema)}
        if self.grammar is not None:
            return {"lark": files.text(self.grammar, "a Lark grammar")}
        return {names[0]: values[names[0]]}


@dataclass(frozen=True)
class OneText(Structure, Penalties, Ends, Sampling):
    """Those of a text that stands alone."""

    @property
    def given(self) -> dict[str, Any]:
        """Those that are not as they are when left out, by the names of `SamplingParams` and as a
        line of JSON has them. InputError for one that is invalid by itself."""
        values: dict[str, Any] = {**vars(self), "structured": self.structured()}
        left_out = {field.name: field.default for field in fields(self)}
        options: dict[str, Any] = {}
        for name in FIELDS:  # in this order errors are told
            value = values.get(name)
            if value is None or value is False or value == [] or value == left_out.get(name):
                continue
            options[name] = READERS[name](name, value) if name in READERS else value
            CHECKS[name](name, options[name])
        return options


@dataclass(frozen=True)
class OneAnswer(OneText):
    """The same for what should end by itself."""

    max_new_tokens: Annotated[
        Count, _ends("New tokens per answer at most; left out: as many as there is room for.")
    ] = None


@dataclass(frozen=True)
class Report:
    """What is told beside a text."""

    logprobs: Annotated[
        Count,
        _report(
            "Log probabilities of the text's tokens and of the so many likeliest in their places."
        ),
    ] = None
    logprobs_of: Annotated[
        str,
        _report("raw: of the model's own logits; drawn: of the law that tokens were drawn from."),
    ] = "raw"
    prompt_logprobs: Annotated[Count, _report("The same for the prompt's tokens.")] = None


@dataclass(frozen=True)
class Wishes(Report, Several, OneText):
    """All of them."""


def as_json(name: str, value: str) -> Any:
    """An option's value that is JSON."""
    try:
        read = json.loads(value)
        json.dumps(read, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is {shown(value)}, which is no JSON: {error}") from None
    return read


def _ids(name: str, value: str) -> list[int]:
    try:
        return [int(part) for part in value.split(",") if part.strip()]
    except ValueError:
        raise InputError(f"{name} is {shown(value)}; give ids with commas between") from None


def _decay(name: str, value: str) -> list[float]:
    start, _, factor = value.partition(",")
    try:
        return [int(start), float(factor)]
    except ValueError:
        raise InputError(f"{name} is {shown(value)}; give START,FACTOR, such as 30,1.05") from None


def _schema(file: Path) -> Any:
    try:
        return json.loads(files.text(file, "a JSON schema"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{file} is no JSON: {error}; give a JSON schema") from None


READERS: dict[str, Callable[[str, str], Any]] = {
    "bad_words_ids": as_json,
    "sequence_bias": as_json,
    "logit_bias": as_json,
    "suppress_tokens": _ids,
    "begin_suppress_tokens": _ids,
    "stop_token_ids": _ids,
    "exponential_decay_length_penalty": _decay,
}
