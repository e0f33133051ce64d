"""The code in each rank: backends, and the measurement of collectives, links and DDP steps."""
