"""Several engines on Ray, on one machine or more: replicas of a server, and files of prompts.

The only folder that imports ray (the extra `ray`). Ray places processes, reports their deaths, and
receives HTTP requests; events go from replica to server over a separate connection, one message per
step.

Tests under another name:
`serve`: `tests/e2e/test_cluster.py`; `batch`: `tests/e2e/test_killed.py`.
"""

import os
from pathlib import Path

# Ray uses these variables when it is imported, and passes them to the processes that it starts
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
if (Path.home() / ".ray" / "auth_token").is_file():  # `ray start` sets it, joining does not
    os.environ.setdefault("RAY_AUTH_MODE", "token")
