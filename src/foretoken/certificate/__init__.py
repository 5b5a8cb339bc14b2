"""The certificate that a pair keeps the target's distribution: its parts, their tests, and planted
bugs.

Knows no particular model, drafter or rule: all run as they do in generation.

`certify`, `sampled_trial`: `tests/statistical/test_certificate.py`.
"""
