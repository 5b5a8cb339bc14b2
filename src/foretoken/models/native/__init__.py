"""Foretoken's own decoder for CPUs, which runs models with `kernels`. `conversion` packs models for
it and loads them."""
