"""Forwards of fixed shapes, recorded as CUDA graphs and replayed. It does not know OpenVINO or how
tokens are chosen.
"""
