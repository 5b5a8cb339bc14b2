"""The certificate of a target and a draft: tests whether the pair's output has the target's
distribution, and planted bugs that these tests must find.

The tests run any model, drafter and acceptance method in the same way as generation does.
`tests/statistical/test_certificate.py` tests `certify` and `sampled_trial`.
"""
