"""Conversion between token ids and text: incremental detokenization, stop strings, chat templates
and replies."""
