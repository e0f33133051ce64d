"""The run in a browser."""
