"""A package to be run with -m pkg.mod."""

IMPORTED_AS = __name__
