"""What several benchmarks share: launchers, processes, statistics, targets and output."""
