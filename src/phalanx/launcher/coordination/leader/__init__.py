"""The coordinator of node 0, which decides for all nodes."""
