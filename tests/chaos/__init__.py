"""Faults in real runs, determined by a seed, compared with undisturbed runs: `make chaos`, or `python -m
tests.chaos`.
"""
