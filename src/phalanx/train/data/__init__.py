"""Which samples a rank reads, in which order."""
