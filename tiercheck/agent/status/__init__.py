"""What an agent shows of itself: a page, metrics, and a snapshot of both."""
