"""Foretoken's own decoder for CPUs, over `kernels`; `conversion` packs and loads models for it."""
