"""What agent and worker agree on: environment names, events."""
