"""transformers' own models over a cache whose rows differ in length, and what is computed from
their weights: sketches and packed layers. It does not depend on the native decoder or CUDA graphs.
"""
