"""Loads models from folders and from the hub on any backend, and drafts by name. Does not depend on
prompts."""
