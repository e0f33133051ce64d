"""Rules about what all ranks of a host share: files, GPUs and the terminal."""
