"""The ceilings: what the machine gives to a program that does nothing but move the bytes."""
