"""Backends that run transformers' own models, over a cache for sequences of different lengths or
one sequence at a time; and values computed from their weights, such as sketches and packed layers.
"""
