"""The paper's experiments, one a file: what to measure, how, and what to say of it.

`experiment` has what they share, `paper` the figures that the paper prints.
"""
