"""A draft model of another tokenizer than the target's: it is translated, and which way it guesses
best is measured once the target runs.

Both ways are those of Timor et al. 2025 (arXiv 2502.05202); `models.vocabularies.translated` says
what they are.
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
TRIAL_TOKENS, TRIAL_GAMMA, TRIAL_SEED = (
    24,
    3,
    0,
)  # of each prompt's text, at the temperatures 0 and 1
COVERAGE_STRIDE = 6  # tokens a look at the draft's whole distribution
WAY_NAMES = {True: "by its text", False: "by shared words"}


class _Trial(NamedTuple):
    """Acceptance with one way of drafting."""

    tokens_per_step: float  # tokens per call of the target
    alpha: float
    sequences: list[list[int]]  # the target's, prompts included


ModelVocabulary = tuple[
    str, "PreTrainedTokenizerBase | None", int
]  # a model's name, tokenizer and V


def make_dictionary(draft: ModelVocabulary, target: ModelVocabulary) -> VocabularyMap | None:
    """Return the words of both; None where ids mean the same, or without two tokenizers to compare.
    RefusedError where they share no word, and as `Words.of`."""
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
    """Return the drafter that a model of other words than the target's makes: it guesses in the
    better of both ways, greedily and sampled, by a few texts of the target's: in seconds, and the
    same each time."""
    V = target.model.vocab_size

    def make_drafter(by_text: TextDrafting) -> LMDrafter:
        return LMDrafter(TranslatedModel(model, dictionary, V, by_text))

    try:
        with log_if_slow(log, "trying how %s guesses best", name):
            trials = {
                (greedy, by_text): _run_trial(
                    target, make_drafter(TextDrafting(by_text, by_text)), greedy=greedy
                )
                for greedy in (True, False)
                for by_text in (True, False)
            }
    except ForetokenError as error:  # such as a target that cannot read the prompts
        log.info("%s guesses as it would by default: %s", name, error)
        return make_drafter(TextDrafting())
    better = (
        trials[greedy, True].tokens_per_step > trials[greedy, False].tokens_per_step
        for greedy in (True, False)
    )
    best = make_drafter(TextDrafting(*better))
    _log_choice(name, best, trials)
    return best


def _run_trial(target: LoadedTarget, drafter: LMDrafter, *, greedy: bool) -> _Trial:
    # its texts are nobody's: no warning of how the model would sample
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
    prompts = map(spec.inputs.ids, TRIAL_PROMPTS)
    sequences = [[*ids, *each.tokens] for ids, each in zip(prompts, completions, strict=True)]
    tokens = fmean(len(step.new_tokens) for step in steps)
    return _Trial(tokens, fmean(overlaps) if overlaps else 0.0, sequences)


def _log_choice(name: str, drafter: LMDrafter, trials: dict[tuple[bool, bool], _Trial]) -> None:
    """Log the choice, and the draft's mass on tokens that the target lacks."""
    model = drafter.model
    assert isinstance(model, TranslatedModel)
    sequences = trials[False, False].sequences
    coverage = model.measure_coverage(
        [text[:n] for text in sequences for n in range(len(text), 0, -COVERAGE_STRIDE)]
    )
    log.info(
        "%s has another tokenizer: %d of its %d words are the target's too, with %.1f %% of its"
        " mass in the target's texts; it guesses %s at temperature 0 and %s above (alpha %s)",
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
