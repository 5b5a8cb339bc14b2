"""Trainers of small models from text: decoders, and encoder-decoders."""
