"""What a row asks of its text: penalties, bans, grammars, a user's own processors."""
