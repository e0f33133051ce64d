"""Snapshots: the state, copied now and then to memory that outlives the workers, and to another node."""
