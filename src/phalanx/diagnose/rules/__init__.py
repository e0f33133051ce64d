"""One kind of cause per file: evidence -> verdicts."""
