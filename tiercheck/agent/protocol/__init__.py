"""What a trainer and its agent say to each other, and where they meet."""
