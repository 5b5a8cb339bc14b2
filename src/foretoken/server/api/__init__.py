"""OpenAI's protocol: what requests may hold, and what answers look like.

Tests under another name:
`errors`, `tools`, `turns`: `tests/unit/server/api/test_wire.py`.
`answers`, `chat`, `completions`, `responses`: `tests/unit/server/test_app.py`.
"""
