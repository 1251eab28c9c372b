"""Opening a job: what its ranks do together between the recovery and the first step."""
