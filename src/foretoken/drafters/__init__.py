"""Drafters: they propose draft tokens, with the distributions that these were sampled from.
They use `sampling/draw.py` and `models/base.py`, and do not depend on the acceptance method."""
