"""Forming a new generation of the group: assignments, spares, and workers that cannot leave the old group."""
