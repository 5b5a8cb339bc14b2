"""Controls of a sequence's output: penalties, bans, grammars, custom processors."""
