"""From logits to a verdict: laws, keyed draws, the rules that keep guesses, and the judges that
apply them; and what a row may wish for. Knows no models and no rows.

`checks`, `options`: `tests/unit/sampling/test_params.py`
"""
