"""Replays of optimizer steps in Numba."""
