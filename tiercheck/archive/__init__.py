"""What jobs have left in their tiers, looked at from outside: nothing is written, and no training code is needed."""
