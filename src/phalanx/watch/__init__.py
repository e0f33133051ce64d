"""Shows a run from its events: in the terminal, in a browser, as a report, as metrics."""
