"""What is imported before the fork, and how a worker sees it."""
