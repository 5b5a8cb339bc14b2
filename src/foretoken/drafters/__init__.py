"""Drafters: objects that propose draft tokens, each sampled token with the distribution q that it
was sampled from. They use `sampling/draw.py` and `models/base.py`, and do not depend on the
acceptance method."""
