"""Training of drafts: data, losses, and training runs that can be resumed."""
