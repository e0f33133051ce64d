"""The console: what is shown of the output of all ranks, and where."""
