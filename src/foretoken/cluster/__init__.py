"""Several engines on a Ray cluster of one or more machines, as replicas of a server (`serve`) or
for the prompts of a file (`batch`).

No other package imports ray (the extra `ray`). Ray places the processes, reports their deaths, and
receives HTTP requests. Outputs do not pass through Ray: a replica sends them to the server over a
separate connection, one message per step.

Tests under another name: `serve`: `tests/e2e/test_cluster.py`; `batch`: `tests/e2e/test_killed.py`.
"""

import os
from pathlib import Path

# Ray reads these variables when it is imported, and passes them to the processes that it starts
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
if (Path.home() / ".ray" / "auth_token").is_file():  # only `ray start` would set the mode itself
    os.environ.setdefault("RAY_AUTH_MODE", "token")
