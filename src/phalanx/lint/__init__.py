"""Finds errors in distributed scripts by reading them. Scripts are never run or imported. Pure."""
