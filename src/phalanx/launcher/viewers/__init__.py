"""Processes that show a run: the event server, the dashboard, the terminal view."""
