"""The server of a node's memory for its neighbours. Its protocol is free of I/O."""
