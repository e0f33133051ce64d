"""Breakpoints and debuggers inside a worker."""
