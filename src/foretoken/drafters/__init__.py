"""Drafters: how guesses are made, and the laws they were drawn from. Each knows the draw and models
by protocol, none knows the target's rule."""
