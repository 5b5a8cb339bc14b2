"""Drafters: how draft tokens are made, and the distributions they were drawn from. Each knows the
draw and models by protocol, none knows the target's rule."""
