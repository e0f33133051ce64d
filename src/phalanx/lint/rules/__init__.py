"""One rule per file: `NAME`, and `check(model)`, which yields findings."""
