"""Decides which samples a rank reads, and in which order."""
