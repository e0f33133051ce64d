"""Is the run stalled, and why: detection, evidence, stacks, dumps."""
