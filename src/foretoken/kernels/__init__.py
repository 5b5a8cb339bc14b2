"""Our own kernels for CPUs: C++ for every instruction set, defined to the bit in NumPy.

`build` compiles `cpp/`; `library` calls what was compiled; `reference` is the arithmetic.
"""
