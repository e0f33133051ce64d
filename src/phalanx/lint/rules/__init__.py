"""One rule a file: `NAME`, and `check(model) -> Findings`."""
