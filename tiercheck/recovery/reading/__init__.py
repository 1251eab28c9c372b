"""One rank's part of a recovery point: read from its copies, verified, and replayed."""
