"""From what the tiers hold to the state of every rank, as of one version."""
