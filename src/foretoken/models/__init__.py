"""The `Model` base class and its backends: transformers, the native decoder and CUDA graphs, with
their self-check. Does not depend on sampling, model names or tokenizers.
"""
