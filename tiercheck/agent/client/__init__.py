"""The trainer's side of the node agent."""
