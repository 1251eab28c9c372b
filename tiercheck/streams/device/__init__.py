"""A GPU as the trainer's data path sees it: streams, events, and memory on both sides of a copy."""
