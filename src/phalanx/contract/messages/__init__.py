"""Messages between a worker, its agent and the process that started it."""
