"""The collectives of this process: process groups, the current call, and what flight recorders have kept."""
