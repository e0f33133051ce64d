"""Verbs that list and end runs."""
