"""What `phalanx demo` and `phalanx tour` run, and the digits that they and the examples learn from."""
