"""Faults in real runs, by a seed, checked against undisturbed runs: `make chaos`, or `python -m tests.chaos`."""
