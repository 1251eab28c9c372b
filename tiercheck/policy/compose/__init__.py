"""What a user composes: cadence, placement, retention and pacing, each a protocol and its built-in policies."""
