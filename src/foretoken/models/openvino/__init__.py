"""OpenVINO graphs of transformers models: export, rounding, compilation, store, and two ways to run
them, over pages and over an explicit cache. It does not know how a runtime is chosen.
"""
