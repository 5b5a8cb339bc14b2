"""The command line: options, commands and their output; `script` is the entry point. It contains
no tensor code.
"""

from foretoken.cli.script import app, main

__all__ = ["app", "main"]
