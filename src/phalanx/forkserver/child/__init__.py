"""A forked worker from the fork to its end: setup, main module, finalization."""
