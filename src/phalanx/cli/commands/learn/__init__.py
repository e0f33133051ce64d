"""Verbs that show what phalanx does, and how fast."""
