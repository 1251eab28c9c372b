"""The tests of this distribution, run from anywhere: they know TierCheck only as it is installed."""
