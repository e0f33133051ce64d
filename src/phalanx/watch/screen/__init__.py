"""The run in a terminal."""
