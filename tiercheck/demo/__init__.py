"""A failure, a recovery, and the proof that nothing was lost: ``tiercheck demo``."""
