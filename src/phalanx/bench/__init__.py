"""Benchmarks: phalanx and its peers side by side, in one run, on this machine. One file a question."""
