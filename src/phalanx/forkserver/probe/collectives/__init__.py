"""The collectives of this process: process groups, the current call, and the entries of flight recorders."""
