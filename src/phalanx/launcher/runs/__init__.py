"""Runs as files: folder, events, history, summary, root cause."""
