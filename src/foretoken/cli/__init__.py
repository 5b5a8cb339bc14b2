"""The command line: options, commands, and what they print. Knows no tensors.

Measured and computed is elsewhere; `script` is the way in.
"""

from foretoken.cli.script import app, main

__all__ = ["app", "main"]
