"""Decides when checkpoints and snapshots are made."""
