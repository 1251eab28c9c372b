"""Replay: from a base and its differentials to the state."""
