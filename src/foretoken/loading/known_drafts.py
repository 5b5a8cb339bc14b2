"""Published drafts that foretoken knows by name, for targets known by name. Uses no network.

The table was made from the pages of the drafts' authors: the READMEs and docs of vLLM's
speculators, DeepSpec, DFlash, EAGLE and SpecForge (SpecBundle), transformers' tests, and Google's
model pages of Gemma 4. Only drafts of kinds that foretoken loads are in the table.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePath

from foretoken.loading import hub, named_models, published_drafts
from foretoken.loading.published_drafts import SUPPORTED_KINDS

KNOWN_DRAFTS_DATE = "2026-11-30"  # the day on which the pages were read

# Name of the target -> drafts, the most promising first. EAGLE-3 comes first, because these drafts
# also run on the native decoder
KNOWN_DRAFTS: dict[str, tuple[str, ...]] = {
    "DeepSeek-R1-Distill-Llama-8B": ("yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B",),
    "Llama-3.1-8B-Instruct": (
        "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",
        "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
        "lmsys/SGLang-EAGLE3-Llama-3.1-8B-Instruct-SpecForge",
        "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
    ),
    "Llama-3.3-70B-Instruct": (
        "RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3",
        "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B",
        "lmsys/SGLang-EAGLE3-Llama-3.3-70B-Instruct-SpecForge",
    ),
    "Llama-4-Maverick-17B-128E-Instruct": (
        "RedHatAI/Llama-4-Maverick-17B-128E-Instruct-speculator.eagle3",
        "lmsys/sglang-EAGLE3-Llama-4-Maverick-17B-128E-Instruct-v1",
    ),
    "Llama-4-Scout-17B-16E-Instruct": (
        "lmsys/SGLang-EAGLE3-Llama-4-Scout-17B-16E-Instruct-SpecForge",
    ),
    "OLMoE-1B-7B-0125-Instruct": ("wantsleep/OLMoE_1B_7B_Eagle3",),
    "Qwen3-1.7B": ("AngelSlim/Qwen3-1.7B_eagle3",),
    "Qwen3-4B": (
        "AngelSlim/Qwen3-4B_eagle3",
        "deepseek-ai/dspark_qwen3_4b_block7",
        "z-lab/Qwen3-4B-DFlash-b16",
    ),
    "Qwen3-8B": (
        "RedHatAI/Qwen3-8B-speculator.eagle3",
        "AngelSlim/Qwen3-8B_eagle3",
        "Tengyunw/qwen3_8b_eagle3",
        "deepseek-ai/dspark_qwen3_8b_block7",
        "RedHatAI/Qwen3-8B-speculator.dflash",
        "z-lab/Qwen3-8B-DFlash-b16",
    ),
    "Qwen3-14B": (
        "RedHatAI/Qwen3-14B-speculator.eagle3",
        "AngelSlim/Qwen3-14B_eagle3",
        "deepseek-ai/dspark_qwen3_14b_block7",
    ),
    "Qwen3-32B": ("RedHatAI/Qwen3-32B-speculator.eagle3", "AngelSlim/Qwen3-32B_eagle3"),
    "Qwen3.8-27B": ("z-lab/Qwen3.8-27B-DFlash2",),
    "Qwen3-30B-A3B": (
        "Tengyunw/qwen3_30b_moe_eagle3",
        "AngelSlim/Qwen3-a3B_eagle3",
        "RedHatAI/Qwen3-30B-A3B-speculator.dflash",
    ),
    "Qwen3-30B-A3B-Instruct-2507": (
        "RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.eagle3",
        "lmsys/SGLang-EAGLE3-Qwen3-30B-A3B-Instruct-2507-SpecForge-Nex",
        "RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.dflash",
    ),
    "Qwen3-235B-A22B": (
        "RedHatAI/Qwen3-235B-A22B-speculator.eagle3",
        "lmsys/Qwen3-235B-A22B-EAGLE3",
    ),
    "Qwen3-235B-A22B-Instruct-2507": (
        "RedHatAI/Qwen3-235B-A22B-Instruct-2507-speculator.eagle3",
        "lmsys/SGLang-EAGLE3-Qwen3-235B-A22B-Instruct-2507-SpecForge-Meituan",
    ),
    "Qwen3-Coder-30B-A3B-Instruct": (
        "lmsys/SGLang-EAGLE3-Qwen3-Coder-30B-A3B-Instruct-SpecForge",
        "z-lab/Qwen3-Coder-30B-A3B-DFlash",
    ),
    "Qwen3-Coder-480B-A35B-Instruct": (
        "lmsys/SGLang-EAGLE3-Qwen3-Coder-480B-A35B-Instruct-SpecForge-EigenAI",
    ),
    "Qwen3-Coder-Next": ("z-lab/Qwen3-Coder-Next-DFlash",),
    "Qwen3-Next-80B-A3B-Instruct": (
        "lmsys/SGLang-EAGLE3-Qwen3-Next-80B-A3B-Instruct-FP8-perfect-blend-regenerated",
    ),
    "Qwen3.5-4B": ("z-lab/Qwen3.5-4B-DFlash",),
    "Qwen3.5-9B": ("z-lab/Qwen3.5-9B-DFlash",),
    "Qwen3.5-27B": ("z-lab/Qwen3.5-27B-DFlash",),
    "Qwen3.5-35B-A3B": ("z-lab/Qwen3.5-35B-A3B-DFlash",),
    "Qwen3.5-122B-A10B": ("z-lab/Qwen3.5-122B-A10B-DFlash",),
    "Qwen3.6-27B": ("z-lab/Qwen3.6-27B-DFlash",),
    "Qwen3.6-35B-A3B": (
        "RedHatAI/Qwen3.6-35B-A3B-speculator.dspark",
        "z-lab/Qwen3.6-35B-A3B-DFlash",
    ),
    "gemma-4-E2B-it": ("google/gemma-4-E2B-it-assistant",),
    "gemma-4-E4B-it": ("google/gemma-4-E4B-it-assistant",),
    "gemma-4-12B-it": ("google/gemma-4-12B-it-assistant",),
    "gemma-4-26B-A4B-it": (
        "RedHatAI/gemma-4-26B-A4B-it-speculator.eagle3",
        "google/gemma-4-26B-A4B-it-assistant",
    ),
    "gemma-4-31B-it": (
        "RedHatAI/gemma-4-31B-it-speculator.eagle3",
        "RedHatAI/gemma-4-31B-it-speculator.dflash",
        "google/gemma-4-31B-it-assistant",
    ),
    "gpt-oss-20b": (
        "RedHatAI/gpt-oss-20b-speculator.eagle3",
        "zhuyksir/EAGLE3-gpt-oss-20b-bf16",
        "z-lab/gpt-oss-20b-DFlash",
    ),
    "gpt-oss-120b": (
        "RedHatAI/gpt-oss-120b-speculator.eagle3",
        "lmsys/EAGLE3-gpt-oss-120b-bf16",
        "z-lab/gpt-oss-120b-DFlash",
    ),
    "granite-3.1-1b-a400m-instruct": ("wantsleep/granite-3.1-1b-a400m-EAGLE3",),
    "vicuna-13b-v1.3": ("yuhuili/EAGLE3-Vicuna1.3-13B",),
}

DRAFT_KIND = re.compile(r"eagle-?3|dflash2?|domino|dspark|peagle|assistant", re.IGNORECASE)
NAME_SEPARATOR = re.compile(r"[-_.\s]+")
# words of a draft's name that are not in its target's name
DRAFT_WORDS = re.compile(
    r"(?:eagle-?3|dflash2?|domino|dspark|peagle|assistant|speculators?|draft|sglang|specforge|preview)"
    r"|b\d+|block\d+"
)
# the end of the name of a quantized copy; drafts for the original draft for the copy too
QUANTIZED_SUFFIX = re.compile(
    r"(?:[-.](?:GGUF|FP8|AWQ|GPTQ(?:-Int[48])?|bnb-4bit|BF16|F16|I?Q\d\w*|MXFP4\w*))+$",
    re.IGNORECASE,
)


def list_known_drafts(target: str) -> list[str]:
    """Return the names of the published drafts for a target, the most promising first: the draft
    that ships, those in the hub's cache, then those in the table. Drafts in the cache are found by
    their names.

    Args:
        target: A folder, a GGUF file or a hub id. Only its name matters.

    Returns:
        Values for `--draft`; [] if no draft is known.

    Examples:
        >>> list_known_drafts("Qwen/Qwen3-1.7B-GGUF")
        ['AngelSlim/Qwen3-1.7B_eagle3']
    """
    known, cached = list_table_drafts(target), hub.list_cached_ids()
    shipped = named_models.get_asset("smollm2-draft")
    first = [named_models.SMOLLM2] if is_declared_for(shipped, target) else []
    first += [each for each in known if each in cached]
    first += [
        each
        for each in cached
        if parse_kind(each) in SUPPORTED_KINDS and is_named_for(each, target)
    ]
    return list(dict.fromkeys((*first, *known)))


def list_table_drafts(target: str) -> tuple[str, ...]:
    """Return the hub ids of the drafts for a target in the table, the most promising first."""
    words = split_target_name(target)
    return next((ids for name, ids in KNOWN_DRAFTS.items() if split_name(name) == words), ())


def parse_kind(draft: str) -> str | None:
    """Return the kind that a draft's name states; None if the name states no kind.

    Examples:
        >>> parse_kind("z-lab/Qwen3-8B-DFlash-b16"), parse_kind("Qwen/Qwen3-8B")
        ('dflash', None)
    """
    match = DRAFT_KIND.search(PurePath(draft).name)
    kind = match.group().lower().replace("-", "") if match else None
    return "dflash" if kind == "domino" else kind  # a DFlash with another head


def find_kind(name: str) -> str | None:
    """Return the kind of the draft with this name; None for the name of a model. Models for chats
    are called assistants too, so an assistant is a draft only if it is in the table.

    Examples:
        >>> find_kind("google/gemma-4-E4B-it-assistant"), find_kind("lab/medical-assistant")
        ('assistant', None)
    """
    kind = parse_kind(name)
    is_known = any(name in drafts for drafts in KNOWN_DRAFTS.values())
    return kind if is_known or kind != "assistant" else None


def is_named_for(draft: str, target: str) -> bool:
    """Return whether the name of a draft consists of the target's name and of words for drafts.

    Examples:
        >>> is_named_for("RedHatAI/Qwen3-8B-speculator.eagle3", "Qwen/Qwen3-8B")
        True
        >>> is_named_for("RedHatAI/Qwen3-8B-Base-speculator.eagle3", "Qwen/Qwen3-8B")
        False
    """
    words = split_name(draft)
    shared_words = [each for each in words if not DRAFT_WORDS.fullmatch(each)]
    return shared_words != words and shared_words == split_target_name(target)


def is_declared_for(folder: Path, target: str) -> bool:
    """Return whether the config in a draft's folder names the target."""
    config = published_drafts.read_config(folder / "config.json")
    declared = published_drafts.get_target_name(config)
    return declared is not None and split_target_name(declared) == split_target_name(target)


def split_target_name(target: str) -> list[str]:
    """Return the words of a target's name, in lower case, without the words for quantization."""
    name = PurePath(target.rpartition(":")[2]).name.removesuffix(".gguf")
    return split_name(QUANTIZED_SUFFIX.sub("", name))


def split_name(name: str) -> list[str]:
    """Return the words of a model's name, in lower case, without its owner."""
    return NAME_SEPARATOR.split(PurePath(name).name.lower())
