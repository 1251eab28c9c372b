"""Block quantisation in Numba: how blocks are run (``blockwise``), and one module for each code."""
