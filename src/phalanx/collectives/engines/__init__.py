"""What moves and reduces memory between ranks: shared memory, gloo, MPI, and several hosts."""
