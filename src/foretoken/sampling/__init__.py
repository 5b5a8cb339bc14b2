"""Sampling and verification: distributions from logits, keyed random numbers, acceptance methods,
verifiers, and the sampling params of a request. This package imports no code of models.

`tests/unit/sampling/test_params.py` tests `checks` and `options`.
"""
