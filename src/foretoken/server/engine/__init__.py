"""The engine's process, and the HTTP process's end of the pipe to it.

Nothing but `worker`, `words` and `ledger` runs in the engine's process, and only there torch is
imported.

Tests under another name:
`writing`, `messages`, `process`: `tests/unit/server/engine/test_link.py`.
`logs`: `tests/unit/server/test_metrics.py`.
"""
