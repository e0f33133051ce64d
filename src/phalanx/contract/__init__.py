"""What supervisor and worker agree on: environment names, events."""
