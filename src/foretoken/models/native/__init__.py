"""Our own decoder for CPUs: kernels in C++ for every instruction set, defined once in NumPy.

`build` compiles it; `conversion` makes and loads what it runs.
"""
