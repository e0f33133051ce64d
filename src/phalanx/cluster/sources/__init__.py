"""Sources that describe a run: hosts, schedulers, the environment. Only this package reads os.environ."""
