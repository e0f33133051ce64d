"""Inside a worker: where it stands among the others."""
