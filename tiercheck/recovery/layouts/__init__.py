"""Recovery by other ranks, or by another model, than those that saved."""
