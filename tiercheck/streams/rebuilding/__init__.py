"""States put together from what is stored: without the job that wrote it, or under another layout."""
