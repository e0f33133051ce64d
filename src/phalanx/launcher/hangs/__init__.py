"""Stalled runs: detection, evidence, stacks, dumps."""
