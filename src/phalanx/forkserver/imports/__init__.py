"""Imports before the fork, and how a worker sees them."""
