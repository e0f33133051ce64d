"""The programs that `phalanx demo` and `phalanx tour` run, and the digits that they and the examples train on."""
