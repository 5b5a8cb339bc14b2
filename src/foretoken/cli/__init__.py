"""The command line: options, commands, and what they print; `script` is the way in. It computes
nothing itself and knows no tensors.
"""

from foretoken.cli.script import app, main

__all__ = ["app", "main"]
