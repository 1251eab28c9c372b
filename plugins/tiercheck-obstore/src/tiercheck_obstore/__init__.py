"""TierCheck tiers on object stores, through obstore (the Rust ``object_store``)."""
