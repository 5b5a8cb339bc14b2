"""Sampling and verification: distributions from logits, keyed random numbers, acceptance methods,
the verifiers that apply them, and the sampling params of a request. It imports no code of models.

`tests/unit/sampling/test_params.py` tests `checks` and `options`.
"""
