"""Weights of a graph in fewer bytes: the same numbers, or rounded ones, another model."""
