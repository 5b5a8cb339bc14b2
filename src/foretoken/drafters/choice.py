"""Several drafters for one target, of which one drafts for each sequence in each step."""

from __future__ import annotations

from dataclasses import replace

from foretoken.drafters.base import Draft, Drafter, pack, require_drafter, require_vocabulary
from foretoken.drafters.mixture import extend_tokens, join_distributions, join_tops
from foretoken.models.base import Model
from foretoken.sampling.draw import Draw


class DrafterChoice(Drafter):
    """Several drafters, of which one drafts for each sequence in each step.

    The gamma policy chooses the drafter before the step, from the measured costs of the drafters
    and from the acceptance in the sequence's earlier steps, never from the step's random numbers.
    So q is the distribution of the drafter that drafted. All drafters follow all sequences.

    Args:
        parts: The drafters. With a fixed gamma, the first one drafts.

    Attributes:
        chosen: For each sequence, the index of the drafter that drafts in the next step. Sequences
            without an entry use the first drafter.

    Raises:
        InputError: The drafters' vocabularies differ.

    Examples:
        >>> import foretoken
        >>> from foretoken.drafters.choice import DrafterChoice
        >>> small = foretoken.load("novels", draft="none").target
        >>> drafter = DrafterChoice([foretoken.LMDrafter(small), foretoken.LookupDrafter()])
        >>> spec = foretoken.load("novels", draft=drafter)
        >>> (out,) = spec.generate("The captain looked", max_new_tokens=8, gamma=3)
        >>> out.text
        ' at the doctor, and the doctor said'
    """

    has_own_speed = True  # its speed depends on its parts

    def __init__(self, parts: list[Drafter]) -> None:
        self.parts = [require_drafter(part) for part in parts]
        self.holds = tuple(self.parts)
        sizes = [part.vocab_size for part in self.parts if part.vocab_size is not None]
        self.vocab_size = sizes[0] if sizes else None
        for part in self.parts:
            require_vocabulary(part, sizes[0] if sizes else 0, "another drafter of the choice")
        self.runtime = "+".join({part.runtime: None for part in self.parts})
        self.chosen: list[int] = []

    def start(
        self, rows: list[int], prompts: list[list[int]], sources: list[list[int]] | None
    ) -> None:
        for part in self.parts:
            copies = sources and [list(source) for source in sources]
            part.start(rows, [list(prompt) for prompt in prompts], copies)

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        chosen = [*self.chosen, *[0] * len(gamma)][: len(gamma)]
        pairs = list(zip(gamma, chosen, strict=True))
        budgets = [[g if part == i else 0 for g, part in pairs] for i in range(len(self.parts))]
        # a drafter without budget may catch up with the sequences
        proposals = zip(self.parts, budgets, strict=True)
        drafts = [part.propose(budget, draw) for part, budget in proposals]
        used = [draft for draft, budget in zip(drafts, budgets, strict=True) if any(budget)]
        if len(used) < 2:
            return used[0] if used else drafts[0]
        tokens: list[list[int]] = [[] for _ in gamma]
        for draft in used:
            extend_tokens(tokens, draft)
        packed = pack(tokens, join_distributions(used), max(draft.calls for draft in used))
        return replace(packed, tops=join_tops(used))

    def with_target(self, target: Model) -> DrafterChoice:
        parts = [part.with_target(target) for part in self.parts]
        return self if parts == self.parts else DrafterChoice(parts)

    def commit(self, tokens: list[list[int]]) -> None:
        for part in self.parts:
            part.commit([list(new) for new in tokens])

    def leave(self, rows: list[int]) -> None:
        self.chosen = []
        for part in self.parts:
            part.leave(rows)
