"""The objects and values of `run.keep`, and the check that all ranks have the same."""
