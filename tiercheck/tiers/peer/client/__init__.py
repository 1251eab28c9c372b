"""The client of a peer server. Its protocol is free of I/O."""
