"""Real servers and file systems for the tests: each module starts one on loopback and takes it down again."""
