"""OpenVINO graphs of transformers models: export, rounding, compilation, store, and two ways to run
them, over pages and over an explicit cache. It does not know how a runtime is chosen.

`export_paged`: `tests/unit/models/openvino/test_paged.py`.
`export_block`, `export_explicit`, `tracing`: `tests/unit/models/openvino/test_explicit.py`.
`conversion`: `tests/unit/loading/test_runtimes.py`.
"""
