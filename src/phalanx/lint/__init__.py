"""Finds errors of distributed scripts by reading them. Scripts are never run or imported. Pure."""
