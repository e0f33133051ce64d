"""The state of a run, folded from its events."""
