"""Rows on their way through a target and a drafter: which run, which wait, and the step that
advances them. Knows no texts and no files."""
