"""Decoders on ONNX Runtime: a graph of few large operations, written from a network's modules, over
keys and values that stay where they are. It does not know how a runtime is chosen.
"""
