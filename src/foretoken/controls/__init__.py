"""Controls of a sequence's text: penalties, bans, grammars, a user's own processors."""
