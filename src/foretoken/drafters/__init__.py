"""Drafters: how draft tokens are made, and the distributions they were drawn from. Each knows the
draw and the base of models, none knows the target's rule."""
