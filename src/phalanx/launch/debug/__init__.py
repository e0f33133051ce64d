"""Debuggers in ranks, and the terminal that they borrow."""
