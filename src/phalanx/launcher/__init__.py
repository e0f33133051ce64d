"""The agent of one node: fork server, processes, output, signals, the end."""
