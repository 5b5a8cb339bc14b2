"""Keys and values in pages, which several graphs may read and rows share, and the flat passes of a
graph over them. It does not know rows.

`flat`, `pool`: `tests/unit/models/openvino/test_paged.py`.
"""
