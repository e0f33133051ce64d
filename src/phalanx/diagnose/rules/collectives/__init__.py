"""Causes that are visible in collectives: different ones, another order, or one that a rank did not call."""
