"""Our own decoder for CPUs: kernels in C++ for every instruction set, defined once in NumPy.

Not chosen by any runtime yet; `build` compiles it.
"""
