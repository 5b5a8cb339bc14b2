"""The command line: options, commands, and what they print; `script` is the way in. It computes
nothing itself and knows no tensors.

Tests under another name:
`script`, `generate`, `doctor`, `train`: `tests/unit/cli/test_cli.py`.
`settings`: `tests/unit/cli/test_serve.py`.
`load`, `loadsheet`: `tests/unit/cli/test_bench_serve.py`.
`sheet`: `tests/unit/cli/test_measure.py`.
`tracesheet`: `tests/unit/cli/test_trace.py`.
`scoreboard`, `document`: `tests/unit/cli/test_bench.py`.
`heads`: `tests/unit/train/test_heads.py`.
"""

from foretoken.cli.script import app, main

__all__ = ["app", "main"]
