"""Inside a worker: its placement, its process group, and the channel to its agent."""
