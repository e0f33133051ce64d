"""The agent of one node: starts, watches and stops its workers."""
