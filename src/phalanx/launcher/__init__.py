"""The launcher: the agent of one node, with its fork server, workers, output, signals and shutdown."""
