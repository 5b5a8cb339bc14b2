"""The certificate of a target and a draft: tests whether their output has the target's
distribution, and planted bugs that these tests must find.

The tests work with any model, drafter and acceptance method, which run as in generation.
`tests/statistical/test_certificate.py` tests `certify` and `sampled_trial`.
"""
