"""A fleet on paper: the engine's own scheduler and policy over models that run nothing, whose clock
goes on by measured costs.
"""
