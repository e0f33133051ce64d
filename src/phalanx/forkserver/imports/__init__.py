"""Imports before the fork, and their visibility in workers."""
