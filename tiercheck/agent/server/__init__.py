"""The agent as a process: its life, its line to the trainers, and the neighbours' peer server."""
