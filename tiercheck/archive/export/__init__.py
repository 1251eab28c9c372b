"""A version's model, whole, under its own names: in a file that others read."""
