"""Our own decoder for CPUs, over `kernels`: `conversion` makes and loads what it runs."""
