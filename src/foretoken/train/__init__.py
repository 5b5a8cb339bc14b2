"""Training of drafts: texts, losses, and runs that can be resumed."""
