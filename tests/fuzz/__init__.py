"""Generated input for everything that phalanx reads from outside: `make fuzz`, or `python -m tests.fuzz`."""
