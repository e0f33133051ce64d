"""The console: which output of all ranks is shown, and where."""
