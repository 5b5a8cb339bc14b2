"""Speculative beam search (paper, A.4). Knows models by protocol, and neither the step nor the
rules: whether a beam stays is a comparison of scores."""
