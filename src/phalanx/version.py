"""The version of phalanx."""

__version__ = "0.2.0"
