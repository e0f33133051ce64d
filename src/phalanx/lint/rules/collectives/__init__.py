"""Rules about collectives: all ranks have to call the same ones, equally often."""
