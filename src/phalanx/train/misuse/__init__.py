"""Checks for mistakes in a script that raise no error."""
