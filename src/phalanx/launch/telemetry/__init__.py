"""What is measured of ranks, GPUs and hosts while a run goes on."""
