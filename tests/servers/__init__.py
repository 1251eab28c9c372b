"""Real servers and file systems for the tests: each worker starts one on loopback and takes it down again."""
