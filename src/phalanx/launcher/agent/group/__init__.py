"""The parts of a worker group, one job each."""
