"""Backends for torch.distributed: shared memory within a machine, shared memory and gloo across machines, MPI."""
