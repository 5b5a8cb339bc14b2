"""An OpenAI-compatible server: HTTP in one process, the engine in another, plain data between them.

Tests under another name:
`connection`: `tests/e2e/test_faults.py`.
`run`: `tests/unit/server/test_app.py`.
`access_log`, `logs`: `tests/unit/server/test_metrics.py`.
"""
