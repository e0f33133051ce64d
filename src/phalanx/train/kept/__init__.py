"""The objects and values that `run.keep` holds, and the check that all ranks hold the same."""
