<<<<<<< HEAD
"""Training of drafts: texts, losses, and runs that can be resumed."""
=======
"""Training of drafts: texts, losses, and runs that can be resumed. Knows nothing of the command
line, and serves nothing."""
>>>>>>> ngram
