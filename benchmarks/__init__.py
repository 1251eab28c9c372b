"""What the tiers reach against what the machine allows, and whether they lose anything: ``python -m benchmarks -h``."""
