"""Verbs that explain what is wrong with a run, a script or a machine."""
