"""Models behind one protocol, on transformers, OpenVINO and CUDA graphs, and their self-check. It
does not know how tokens are chosen, nor names and tokenizers.

`families`: `tests/unit/models/stock/test_model.py`, `stock/test_selfcheck.py`.
Hidden states of all models: `test_hidden.py`; encoders' own vocabularies:
`test_source_vocabulary.py`.
"""
