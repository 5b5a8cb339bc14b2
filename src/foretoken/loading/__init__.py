"""From names to running models: folders, the hub, runtimes, drafters by name. Knows no prompts and
makes no text."""
