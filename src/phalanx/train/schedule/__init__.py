"""When checkpoints and snapshots are made."""
