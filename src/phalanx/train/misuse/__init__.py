"""Checks for mistakes that a script would not notice by itself."""
