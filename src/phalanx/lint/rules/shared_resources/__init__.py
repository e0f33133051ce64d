"""Rules about resources that all ranks of a host share: files, GPUs and the terminal."""
