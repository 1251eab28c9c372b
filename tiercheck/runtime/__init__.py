"""What a process of a job runs on: its event loop's thread, its group of ranks, and its lock on the node."""
