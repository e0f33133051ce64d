"""Rules about collectives: all ranks must call the same ones, the same number of times."""
