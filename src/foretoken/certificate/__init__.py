"""The certificate that the output of a target with a draft has the target's distribution: its
tests, and planted bugs that they must find.

It depends on no particular model, drafter or acceptance method: all run as in generation.
`tests/statistical/test_certificate.py` tests `certify` and `sampled_trial`.
"""
