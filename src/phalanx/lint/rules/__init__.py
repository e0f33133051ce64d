"""One rule per file, in a package per topic: `NAME`, and `check(model)`, which yields findings."""
