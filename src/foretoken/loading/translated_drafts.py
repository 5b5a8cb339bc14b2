"""Draft models with another tokenizer than the target's. Their draft tokens are translated by the
better of two methods, which is found by a trial on the loaded target.

Both methods are from Timor et al. 2025 (arXiv 2502.05202); see
`models.vocabularies.translated`.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from foretoken.drafters.lm import LMDrafter
from foretoken.errors import ForetokenError
from foretoken.loading.target import LoadedTarget
from foretoken.models.base import Model
from foretoken.models.vocabularies.translated import TextDrafting, TranslatedModel
from foretoken.models.vocabularies.vocabulary import Vocabulary, VocabularyMap
from foretoken.slow_log import log_if_slow
from foretoken.text.decoding import find_differing_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)
TRIAL_PROMPTS = (
    "It was the first day of the",
    "Once upon a time there was",
    "The answer to this question is",
    "She opened the door and",
)
TRIAL_TOKENS, TRIAL_GAMMA, TRIAL_SEED = 24, 3, 0  # for each prompt, at temperature 0 and 1
COVERAGE_STRIDE = 6  # the draft's coverage is measured at each sixth token
WAY_NAMES = {True: "by its text", False: "by shared tokens"}


class _Trial(NamedTuple):
    """The result of a trial of one method at one temperature."""

    tokens_per_step: float  # new tokens / forward passes of the target
    alpha: float
    sequences: list[list[int]]  # the target's token ids, prompts included


ModelVocabulary = tuple[str, "PreTrainedTokenizerBase | None", int]  # name, tokenizer and V


def make_dictionary(draft: ModelVocabulary, target: ModelVocabulary) -> VocabularyMap | None:
    """Return the map between the vocabularies of draft and target; None if equal ids are equal
    tokens in both, or if a tokenizer is missing. Raises RefusedError if the two vocabularies share
    no token, or if `Vocabulary.from_tokenizer` refuses a tokenizer."""
    (name, draft_tokenizer, draft_V), (target_name, target_tokenizer, V) = draft, target
    if (
        draft_tokenizer is None
        or target_tokenizer is None
        or not find_differing_tokens(draft_tokenizer, target_tokenizer)
    ):
        return None
    dictionary = VocabularyMap(
        Vocabulary.from_tokenizer(target_name, target_tokenizer, V),
        Vocabulary.from_tokenizer(name, draft_tokenizer, draft_V),
    )
    dictionary.require(name, target_name)
    return dictionary


def make_translated_drafter(
    name: str, model: Model, dictionary: VocabularyMap, target: LoadedTarget
) -> LMDrafter:
    """Return the drafter of a model with another vocabulary than the target's. A trial of a few
    seconds, on a few prompts with a fixed seed, chooses the better method for temperature 0 and,
    separately, for temperatures above 0."""
    V = target.model.vocab_size

    def make_drafter(by_text: TextDrafting) -> LMDrafter:
        return LMDrafter(TranslatedModel(model, dictionary, V, by_text))

    try:
        with log_if_slow(log, "trying how %s drafts best", name):
            trials = {
                (greedy, by_text): _run_trial(
                    target, make_drafter(TextDrafting(by_text, by_text)), greedy=greedy
                )
                for greedy in (True, False)
                for by_text in (True, False)
            }
    except ForetokenError as error:  # such as a target that cannot encode the prompts
        log.info("%s drafts by the default method: %s", name, error)
        return make_drafter(TextDrafting())
    better = (
        trials[greedy, True].tokens_per_step > trials[greedy, False].tokens_per_step
        for greedy in (True, False)
    )
    best = make_drafter(TextDrafting(*better))
    _log_choice(name, best, trials)
    return best


def _run_trial(target: LoadedTarget, drafter: LMDrafter, *, greedy: bool) -> _Trial:
    # without suggested settings: a trial must not warn that sampling differs from them
    spec = replace(target.make_speculator(drafter, "a trial"), suggested={})
    completions = spec.generate(
        list(TRIAL_PROMPTS),
        max_new_tokens=TRIAL_TOKENS,
        gamma=TRIAL_GAMMA,
        seed=TRIAL_SEED,
        temperature=0.0 if greedy else 1.0,
        ignore_eos=True,
    )
    steps = [step for each in completions for step in each.steps]
    overlaps = [overlap for step in steps for overlap in step.overlaps]
    prompts = map(spec.inputs.encode_prompt, TRIAL_PROMPTS)
    sequences = [[*ids, *each.tokens] for ids, each in zip(prompts, completions, strict=True)]
    tokens = fmean(len(step.new_tokens) for step in steps)
    return _Trial(tokens, fmean(overlaps) if overlaps else 0.0, sequences)


def _log_choice(name: str, drafter: LMDrafter, trials: dict[tuple[bool, bool], _Trial]) -> None:
    """Log the chosen methods, and the draft's probability of tokens that the target has too."""
    model = drafter.model
    assert isinstance(model, TranslatedModel)
    sequences = trials[False, False].sequences
    coverage = model.measure_coverage(
        [ids[:n] for ids in sequences for n in range(len(ids), 0, -COVERAGE_STRIDE)]
    )
    log.info(
        "%s has another tokenizer: the target has %d of its %d tokens, with %.1f %% of its"
        " probability in the target's outputs; it drafts %s at temperature 0 and %s above (alpha"
        " %s)",
        name,
        model.dictionary.num_shared,
        len(model.dictionary.draft.spellings),
        100 * fmean(coverage),
        WAY_NAMES[model.by_text.greedy],
        WAY_NAMES[model.by_text.sampled],
        ", ".join(
            f"{trials[greedy, by_text].alpha:.2f} {WAY_NAMES[by_text]} at {'0' if greedy else '1'}"
            for greedy, by_text in trials
        ),
    )
