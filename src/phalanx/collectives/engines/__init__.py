"""Engines copy and reduce data between ranks: shared memory, gloo, MPI, and several hosts."""
