"""The jobs that an agent replicates: one replicator a rank."""
