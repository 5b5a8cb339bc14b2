"""What a report is made of: a recipe, its prompts, and the pairs that it names, loaded."""
