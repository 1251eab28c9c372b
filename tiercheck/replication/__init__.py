"""Copying what the tiers hold to where policy wants it: the mover, its view of the tiers, and its back-off."""
