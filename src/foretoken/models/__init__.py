"""Models behind one protocol, on transformers, OpenVINO and CUDA graphs, and their self-check. It
does not know how tokens are chosen, nor names and tokenizers.
"""
