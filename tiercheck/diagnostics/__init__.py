"""What a tier is found to be, do and bring."""
