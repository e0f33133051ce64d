"""Verbs that start runs, or what runs need."""
