"""Speculative beam search (paper, appendix A.4), over the models of a Speculator."""
