"""This node's shared memory: ``shm://``."""
