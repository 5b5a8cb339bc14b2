"""Ingredients of a report: a recipe, its prompts, and the pairs that it names, loaded."""
