"""Generated input for everything that phalanx reads from others: `make fuzz`, or `python -m tests.fuzz`."""
