"""An OpenAI-compatible server: HTTP in one process, the engine in another, plain data between them.

Tests under another name:
`run`: `tests/unit/server/test_app.py`.
`journal`: `tests/unit/server/test_metrics.py`.
"""
