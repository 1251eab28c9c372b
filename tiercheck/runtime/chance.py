"""Chance that is not training's.

Python's own generator is a part of what is saved, and of what a job draws from. Who waits for a random time in the same
process must leave it alone: training would be another one after each fault of a store.
"""

from __future__ import annotations

import random

__all__ = ["CHANCE"]

CHANCE = random.Random()
"""Seeded by the system, for the process."""
