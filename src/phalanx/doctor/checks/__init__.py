"""One check per file: facts -> findings."""
