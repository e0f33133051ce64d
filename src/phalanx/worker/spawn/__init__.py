"""Ranks from Python: phalanx.spawn."""
