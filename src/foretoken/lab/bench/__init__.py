"""Speculative against plain decoding, gammas and other libraries, on the clock and as figures.

Knows nothing of how a library works: a contestant continues a prompt and says when.
"""
