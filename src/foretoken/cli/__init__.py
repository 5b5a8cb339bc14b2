"""The command line: commands, their options and their output. `script` is the entry point. The
package contains no tensor code."""

from foretoken.cli.script import app, main

__all__ = ["app", "main"]
