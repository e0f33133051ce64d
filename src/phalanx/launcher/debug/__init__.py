"""Debug sessions in ranks, and the terminal that they use."""
