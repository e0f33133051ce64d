"""Where a run is described: the command line, the environment, later a scheduler. The only readers of os.environ."""
