"""Snapshots: the state, copied at intervals to memory that outlives the workers, and to another node."""
