"""What a recovery takes, against what the machine needs for its bytes."""
