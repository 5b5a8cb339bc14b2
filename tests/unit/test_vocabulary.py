"""Prose and names use the field's words (docs/glossary.md)."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from scripts import ROOT

SRC = ROOT / "src/foretoken"
MODULES = {path: path.read_text(encoding="utf-8") for path in sorted(SRC.rglob("*.py"))}
TREES = {path: ast.parse(source) for path, source in MODULES.items()}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# words that have a right use here and there, and what they mostly stand for
BETTER = {
    r"texts?": "sequence, prompt, output",
    r"rows?": "sequence, request; a row is an index into a tensor",
    r"behind": "after",
    r"kept|keeps?": "cached, stored",
    r"where (?!the |it is|each)": "if, when, for which",
    r"what (?:is|are|was|has|have|it|they|a|an|the|stands|follows|runs|comes)": "a noun",
    r"sa(?:ys|id)": "returns, states",
    r"told|tells?": "reports",
    r"guess(?:es|ed)?": "draft token",
    r"pictures?|sounds?": "image, audio",
    r"so (?:many|long|much|large)": "n",
    r"beside": "with, next to",
    r"go(?:es)? on|gone on": "continue",
}
MAX_HITS = 430  # of these words in the prose of src: lower it when it falls, never raise it
# words that have none
NEVER = {
    r"likeliest": "most probable",
    r"anew": "again",
    r"nobody|whoever|whose own|mates?": "a noun",
    r"spoil(?:s|t|ed)?": "corrupt",
    r"laws?": "distribution",
    r"Knows? no(?:thing)?": "does not depend on",
    r"(?<!there )is no (?:number|folder|model|file|JSON|id|text|option|prompt)": "is not a",
}


def read_prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield docstrings, help texts, messages of errors, and comments, with their lines."""
    for node in ast.walk(TREES[path]):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text
        if isinstance(node, ast.Raise) or (isinstance(node, ast.keyword) and node.arg == "help"):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, part.value
    for token in tokenize.generate_tokens(io.StringIO(MODULES[path]).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def find_words(patterns: dict[str, str]) -> list[str]:
    return [
        f"{path.relative_to(SRC)}:{line}: {match.group().strip()!r}; write {better}"
        for path in MODULES
        for line, text in read_prose(path)
        for pattern, better in patterns.items()
        for match in re.finditer(rf"(?<![\w`])(?:{pattern})(?![\w`])", text)
    ]


def test_prose_uses_the_words_of_the_field() -> None:
    assert not find_words(NEVER)
    found = find_words(BETTER)
    assert len(found) <= MAX_HITS, "\n".join(found)


def test_a_constant_of_one_word_is_defined_once() -> None:
    """Two modules that mean different things give them longer names."""
    places = defaultdict[str, set[Path]](set)
    for path, tree in TREES.items():
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            for name in (name for target in targets for name in ast.walk(target)):
                if isinstance(name, ast.Name) and re.fullmatch(r"_?[A-Z]{2,}", name.id):
                    places[name.id].add(path)
    assert not {name: files for name, files in places.items() if len(files) > 1}


# the first words of functions; a new verb is added here
VERBS = """
abort accepts acquire activate add admit adopt advance allocate allot amortize answer append apply
are as ask assemble attach ban begin bench blame break build can cancel capture certify chain check
choose classify clear close collect commit compare compares compile compute concatenate condition
configure continue convert copies copy count counts create crop cut decode dequantize derive
describe detach detokenize disengage distill draft drafts drain draw draws drop dump embed emit
encode end engage ensure enter estimate exit expand explain export expose extend fail feed fill
filter find finish fit fits flatten fold follows forget fork format forward from gather generate
get group grow handle has hash hide hold holds import install interpolate is iter iterate join
keeps kill lay learn leave limit list listen load locate lock log make map mask match measure merge
monitor multiply name nest normalize number observe open order overlap pack pad pair parse pause
permute place plant pop predict preempt prefetch prefill prefix prepare print probe process project
propose push put raise randomize read reassign rebuild record recount recv refuse register rehearse
rejoin release remove render renew repeat replace replay requeue require reserve reset resize
resolve restore resume retain reuse rewind rewrite roll rotate round run sample save scale schedule
score search select send serialize serve set settle shape share shift shorten show shrink shutdown
sketch spawn spell split splits start step stop store stream strip submit subtract suggest sum
summarize take takes tap teach time to tokenize track transcribe translate trim truncate unpack
unwrap update use verify wait warn warp widen with work wrap write zero
"""
# and names that are not verbs: functions of the paper and of mathematics, a target's quantities,
# commands, endpoints, and callbacks of other libraries
NOUNS = """
argmax_ids attention beta block chat chi_square_tail command completion_to_dict completions
connection_lost convolution costs_at_context costs_from_steps delta_rule doctor draft_seconds dspark
eagle error_function expected_tokens exponential fma greedy_lenient_beta guided health
jensen_shannon lenient_beta lk logits logprobs main mamba mamba2 model models n normal_tails one_hot
optimal_gamma option options page params prepared probabilities ragged_eager ragged_eager_mask
ragged_mask ragged_sdpa readiness recurrence rejection rejection_beta residual responses reverse_kl
sigmoid softmax softplus speculation speculative stacked_attention stats step_seconds steps_factor
tangent target_seconds target_seconds_after tokens_distribution tolist total_variation
transcriptions translations v version vllm walltime_factor
"""


def test_public_functions_begin_with_a_verb() -> None:
    verbs, nouns = set(VERBS.split()), set(NOUNS.split())
    methods = {
        function
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for function in node.body
    }
    top = {node for tree in TREES.values() for node in tree.body}
    wrong: set[str] = set()
    used: set[str] = set()
    for node in (node for node in top | methods if isinstance(node, FUNCTIONS)):
        if node.name.startswith("_") or any(
            "property" in ast.unparse(d) for d in node.decorator_list
        ):
            continue
        first = node.name.split("_")[0]
        used |= {node.name, first}
        if first not in verbs and node.name not in nouns:
            wrong.add(node.name)
    assert not wrong and not (verbs | nouns) - used, (sorted(wrong), sorted((verbs | nouns) - used))
