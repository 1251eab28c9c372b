"""Replays of optimizer steps in Numba: Adam and AdamW, also in closed form, and SGD."""
