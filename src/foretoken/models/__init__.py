"""Models with one base, on transformers, the native decoder and CUDA graphs, and
their self-check. It does not know how tokens are chosen, nor names and tokenizers.
"""
