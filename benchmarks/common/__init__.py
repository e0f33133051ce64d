"""Common code of several benchmarks: launchers, processes, statistics, targets and output."""
