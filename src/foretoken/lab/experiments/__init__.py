"""The paper's experiments, one a file: what to measure, how, and what to say of it.

`experiment` has what they share, `paper` the figures that the paper prints.

Tests under another name:
`acceptance`, `walltime`, `bigram`, `timeline`, `trace`, `quality`, `beyond`:
`tests/unit/lab/experiments/test_measured.py`.
`paper`: `tests/unit/test_paper_tables.py`.
"""
