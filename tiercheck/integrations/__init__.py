"""Ways into a training loop. Each is a module of its own, and imports its framework."""
