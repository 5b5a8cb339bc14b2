"""A report of recipes: measured and resumed, then shown as a page, Markdown and JSON.

Tests under another name:
`chapter`, `document`, `markdown`, `page`, `plots`: `tests/unit/lab/report/test_files.py`.
"""
