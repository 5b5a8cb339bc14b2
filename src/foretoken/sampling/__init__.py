"""From logits to a verdict: distributions, keyed draws, the rules that keep draft tokens, and the
verifiers that apply them; and what a row may wish for. Knows no models and no rows.

`checks`, `options`: `tests/unit/sampling/test_params.py`
"""
