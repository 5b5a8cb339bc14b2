"""Which tokens of a target and a draft mean the same, and what either calls a text of the other."""

from __future__ import annotations

from foretoken.errors import RefusedError
from foretoken.models.vocabularies.words import Words


class Dictionary:
    """Two vocabularies. ours, theirs: the ids of the tokens that both have, pair by pair: they
    stand for the same bytes, are the same special token, or each ends a text."""

    def __init__(self, target: Words, draft: Words) -> None:
        self.target, self.draft = target, draft
        pairs = {id_: draft.ids[word] for word, id_ in target.ids.items() if word in draft.ids}
        self.words = len(pairs)  # without special tokens
        self.special = {
            i: draft.specials[name] for name, i in target.specials.items() if name in draft.specials
        }
        if target.end is not None and draft.end is not None:
            self.special = {i: x for i, x in self.special.items() if x != draft.end}
            self.special[target.end] = draft.end
        pairs |= self.special
        self.ours, self.theirs = list(pairs), list(pairs.values())

    def require(self, draft_name: str, target_name: str) -> None:
        """RefusedError where the two have no word in common."""
        if not self.words:
            raise RefusedError(
                f"{draft_name} shares none of its {len(self.draft.spelled)} words with the "
                f"{len(self.target.spelled)} of {target_name}; give a draft for texts of the same "
                "kind, or draft='lookup'"
            )
