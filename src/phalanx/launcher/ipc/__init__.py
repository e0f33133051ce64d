"""Requests between processes: the control socket of a run, and calls between nodes."""
