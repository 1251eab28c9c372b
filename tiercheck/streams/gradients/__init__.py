"""The gradients of a step: gathered, encoded, the number that scaled them, and the room that they take in a record."""
