"""What differs between two versions: their tensors, and their host states."""
