"""Races under faults, on every driver at once, and an account of what was lost."""
