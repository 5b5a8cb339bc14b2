"""Foretoken's own kernels for CPUs: C++ for several instruction sets, whose results equal those of
a NumPy reference to the bit.

`build` compiles `cpp/`, `library` loads and calls it, `reference` defines the arithmetic.
"""
