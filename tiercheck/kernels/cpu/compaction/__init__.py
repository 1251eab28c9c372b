"""Compaction in Numba: the threshold, the survivors above it, their fp16 form, and the way back to a dense array."""
