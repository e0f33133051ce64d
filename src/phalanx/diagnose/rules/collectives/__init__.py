"""Causes that show in the collectives of ranks: different ones, in another order, or one that a rank did not call."""
