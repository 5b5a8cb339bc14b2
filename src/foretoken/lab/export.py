"""Plans for other systems: the command with the same target, draft and gamma, what of it they do
not honour, and what their verification does to the target's distribution.

The facts about a system are data with their sources (systems.toml). Runs no system and no models.
"""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.resources import files
from math import inf
from pathlib import Path, PurePath
from typing import Any, Literal

from foretoken.errors import InputError, RefusedError

Kind = Literal["plain", "model", "lookup"]  # of a draft that other systems may have

# Drafts that are of this package only, by the word before their colon
OURS = {
    "self": "is a copy of the target that drafts over the target's own keys and values",
    "heads": "reads heads that were trained here",
    "ngram": "is a table with a law of its own, which must take part in the verification",
    "copy": "copies an encoder-decoder's source",
    "uniform": "guesses at random, to compare with",
}


@dataclass(frozen=True, slots=True)
class ExportSetting:
    """A plan in the terms of this package: models as folders or hub ids, guesses per target call,
    and the temperature that requests will have."""

    target: str
    draft: str  # "none" for plain decoding
    gamma: int
    temperature: float = 0.0
    revision: str | None = None
    draft_revision: str | None = None
    encoder_decoder: bool = False
    measured: str = ""  # flags of the measurement beside the above

    def __post_init__(self) -> None:
        if self.gamma < 0:
            raise InputError(f"gamma is {self.gamma}; give 0 or more")
        if not 0 <= self.temperature < inf:
            raise InputError(f"temperature is {self.temperature:g}; give 0 or more, and finite")
        for name in ("target", "draft"):
            if not getattr(self, name):
                raise InputError(f"{name} is empty; give a folder or a hub id")

    @property
    def kind(self) -> Kind:
        """RefusedError for a draft that is of this package only."""
        if self.draft == "none" or not self.gamma:
            return "plain"
        word = self.draft.partition(":")[0]
        if word in OURS:
            raise RefusedError(
                f"draft {self.draft} {OURS[word]}: no other system has it; give the folder of a "
                "model, lookup or none"
            )
        return "lookup" if self.draft == "lookup" else "model"


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact about a system, and its source; about drafts of one kind, or of all."""

    text: str
    source: str
    kind: Kind | None = None

    def concerns(self, setting: ExportSetting) -> bool:
        return self.kind in (None, setting.kind)


@dataclass(frozen=True, slots=True)
class System:
    """One that decodes speculatively; all that is said is of this version."""

    name: str
    version: str
    flags: str  # where its options are documented
    distribution: tuple[Fact, ...]  # what its verification does to the target's distribution
    lacks: tuple[Fact, ...]  # what of a plan it does otherwise, or not at all
    steps: Callable[[ExportSetting], list[str]]  # shell commands, or lines of Python
    converts: bool = False  # whether it reads files of its own kind only


@dataclass(frozen=True, slots=True)
class Export:
    """A plan for a system."""

    system: System
    steps: list[str]
    distribution: list[Fact]
    lacks: list[Fact]


def require(system: System, setting: ExportSetting) -> None:
    """RefusedError for a target or draft that the system does not have."""
    if setting.encoder_decoder:
        raise RefusedError(
            f"{setting.target} is an encoder-decoder, and {system.name} {system.version} has no "
            "speculation for one; export a decoder"
        )
    _ = setting.kind  # refuses what is of this package only
    revision = setting.revision or setting.draft_revision
    if system.converts and revision is not None:
        raise RefusedError(
            f"revision {revision} of a model on the hub: {system.name} reads converted files; "
            "give the folder of that revision"
        )


def with_tokenizer(setting: ExportSetting) -> tuple[list[str], ExportSetting]:
    """A shell command that copies a draft without a tokenizer into the working folder, with the
    target's, and the setting with that copy: other systems' converters want one in each folder."""
    draft = Path(setting.draft)
    if setting.kind != "model" or not draft.is_dir() or [*draft.glob("*tokenizer*")]:
        return [], setting
    folder = converted(setting, setting.draft, "-with-tokenizer")
    command = shlex.join(["mkdir", "-p", folder])
    files = f"{shlex.quote(setting.draft)}/* {shlex.quote(setting.target)}/*tokenizer*"
    return [f"{command} && cp {files} {shlex.quote(folder)}"], replace(setting, draft=folder)


def converted(setting: ExportSetting, model: str, ending: str) -> str:
    """A name in the working folder for what is made of a model: the last two parts of its path; of
    a draft that would have the target's name, one more."""
    names = [
        "-".join([part for part in PurePath(path).parts if part.strip("./")][-2:])
        for path in (model, setting.target)
    ]
    twin = model != setting.target and names[0] == names[1]
    return f"{names[0]}{'-draft' if twin else ''}{ending}"


def export(system: System, setting: ExportSetting) -> Export:
    """RefusedError as `require`."""
    require(system, setting)
    return Export(
        system,
        system.steps(setting),
        [fact for fact in system.distribution if fact.concerns(setting)]
        if setting.kind != "plain"
        else [],
        [*_measured(setting), *(fact for fact in system.lacks if fact.concerns(setting))],
    )


def _measured(setting: ExportSetting) -> list[Fact]:
    if not setting.measured:
        return []
    text = f"the plan was measured with {setting.measured}, which the above does not ask for"
    return [Fact(text, "the measurement")]


VLLM_NGRAM = 8  # tokens of a match at most that vLLM is told: it wants a number, ours matches any


def vllm_config(setting: ExportSetting) -> dict[str, Any]:
    """Its --speculative-config for a draft model or look-up."""
    if setting.kind == "lookup":
        return {
            "method": "ngram",
            "num_speculative_tokens": setting.gamma,
            "prompt_lookup_max": VLLM_NGRAM,
            "prompt_lookup_min": 1,
        }
    settings: dict[str, Any] = {
        "method": "draft_model",
        "model": setting.draft,
        "num_speculative_tokens": setting.gamma,
    }
    if setting.draft_revision is not None:
        settings["revision"] = setting.draft_revision
    if setting.temperature:
        settings["draft_sample_method"] = "probabilistic"
    return settings


def vllm_steps(setting: ExportSetting) -> list[str]:
    command = ["vllm", "serve", setting.target]
    if setting.revision is not None:
        command += ["--revision", setting.revision]
    if setting.kind != "plain":
        command += ["--speculative-config", json.dumps(vllm_config(setting))]
    return [shlex.join(command)]


def sglang_steps(setting: ExportSetting) -> list[str]:
    command = ["python", "-m", "sglang.launch_server", "--model-path", setting.target]
    if setting.revision is not None:
        command += ["--revision", setting.revision]
    verified = str(setting.gamma + 1)  # the last token counts among those that are verified
    if setting.kind == "lookup":
        command += ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", verified]
    elif setting.kind == "model":
        command += ["--speculative-algorithm", "STANDALONE"]
        command += ["--speculative-draft-model-path", setting.draft]
        if setting.draft_revision is not None:
            command += ["--speculative-draft-model-revision", setting.draft_revision]
        command += ["--speculative-num-steps", str(setting.gamma)]
        command += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", verified]
    return [shlex.join(command)]


def llama_cpp_steps(setting: ExportSetting) -> list[str]:
    copied, setting = with_tokenizer(setting)

    def file(model: str) -> str:
        return model if model.endswith(".gguf") else converted(setting, model, ".gguf")

    models = [setting.target, *([setting.draft] if setting.kind == "model" else [])]
    conversions = [
        ["python", "convert_hf_to_gguf.py", model, "--outtype", "f32", "--outfile", file(model)]
        for model in models
        if not model.endswith(".gguf")
    ]
    command = ["llama-server", "--model", file(setting.target)]
    if setting.kind == "model":
        command += ["--model-draft", file(setting.draft), "--spec-type", "draft-simple"]
        command += ["--spec-draft-n-max", str(setting.gamma)]
    elif setting.kind == "lookup":
        command += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-m", str(setting.gamma)]
    # its own defaults are another distribution: temperature 0.8, top-k 40, top-p 0.95, min-p 0.05
    command += ["--temp", f"{setting.temperature:g}"]
    command += ["--top-k", "0", "--top-p", "1", "--min-p", "0"]
    return [*copied, *(shlex.join(each) for each in (*conversions, command))]


GENAI_NGRAM = 3  # tokens of a match, as in its own example


def openvino_genai_steps(setting: ExportSetting) -> list[str]:
    """Lines of a script, the conversions as comments. RefusedError above temperature 0, where its
    rule is wrong."""
    if setting.temperature and setting.kind != "plain":
        raise RefusedError(
            f"temperature is {setting.temperature:g}: above 0 OpenVINO GenAI's speculative "
            "sampling does not keep the target's law; give --temperature 0, or --draft none"
        )
    copied, setting = with_tokenizer(setting)
    # its own default is bfloat16 on processors that can: another distribution
    place = '"CPU", INFERENCE_PRECISION_HINT="f32"'
    target = json.dumps(_genai(setting, setting.target))
    draft = f"genai.draft_model({json.dumps(_genai(setting, setting.draft))}, {place})"
    more = {"plain": "", "model": f", draft_model={draft}", "lookup": ", prompt_lookup=True"}
    how = {
        "plain": "",
        "model": f", num_assistant_tokens={setting.gamma}",
        "lookup": f", num_assistant_tokens={setting.gamma}, max_ngram_size={GENAI_NGRAM}",
    }
    distribution = "do_sample=False"
    if setting.temperature:
        distribution = f"do_sample=True, temperature={setting.temperature:g}, top_k=0"
    models = [setting.target, *([setting.draft] if setting.kind == "model" else [])]
    convert = "optimum-cli export openvino --task text-generation-with-past --weight-format fp32"
    return [
        *(f"# {step}" for step in copied),
        *(
            f"# {convert} --model {shlex.quote(model)} {shlex.quote(_genai(setting, model))}"
            for model in models
            if _genai(setting, model) != model
        ),
        "import openvino_genai as genai",
        f"pipeline = genai.LLMPipeline({target}, {place}{more[setting.kind]})",
        f"config = genai.GenerationConfig(max_new_tokens=64, {distribution}{how[setting.kind]})",
        'print(pipeline.generate("It was", config))',
    ]


def _genai(setting: ExportSetting, model: str) -> str:
    """A model's converted folder; one that is converted is itself."""
    if (Path(model) / "openvino_model.xml").exists():
        return model
    return converted(setting, model, "-openvino")


def _systems() -> list[System]:
    """The systems, with their facts from systems.toml."""
    steps = {
        "vllm": vllm_steps,
        "sglang": sglang_steps,
        "llama_cpp": llama_cpp_steps,
        "openvino_genai": openvino_genai_steps,
    }
    known = tomllib.loads((files("foretoken.lab") / "systems.toml").read_text(encoding="utf-8"))
    return [
        System(
            told["name"],
            told["version"],
            told["flags"],
            distribution=tuple(Fact(**fact) for fact in told["law"]),
            lacks=tuple(Fact(**fact) for fact in told["lacks"]),
            steps=steps[name],
            converts=told["converts"],
        )
        for name, told in known.items()
    ]


VLLM, SGLANG, LLAMA_CPP, OPENVINO_GENAI = _systems()
