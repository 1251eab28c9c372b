"""What the ranks find in their tiers, and tell each other, before anything is decided."""
