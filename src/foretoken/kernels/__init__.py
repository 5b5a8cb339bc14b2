"""Foretoken's own kernels for CPUs: C++ code for several instruction sets, all of which give the
same bits as a NumPy reference.

`build` compiles `cpp/`, `library` loads the result and calls it, and `reference` defines the
arithmetic.
"""
