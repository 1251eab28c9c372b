"""What changes a tier from outside: copying into it, and deleting from it."""
