"""Beyond one machine, on Ray: replicas behind one server, and files of prompts over all of them.

The only folder that imports ray (the extra `ray`). Ray places processes, tells of their deaths, and
takes HTTP in; events go from replica to server by a connection of their own, one message a step.

Tests under another name:
`serve`: `tests/e2e/test_cluster.py`; `batch`: `tests/e2e/test_killed.py`.
"""

import os
from pathlib import Path

# Read by ray when it is imported, and handed on to the processes that it starts
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
if (Path.home() / ".ray" / "auth_token").is_file():  # as `ray start` does; joining does not
    os.environ.setdefault("RAY_AUTH_MODE", "token")
