"""Backends for torch.distributed: shared memory on one host, shared memory and gloo across hosts, MPI."""
