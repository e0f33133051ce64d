"""How fast do ranks talk to each other? Every collective and point to point, any backend, any cluster."""

from phalanx.bench.comm.verb import main

__all__ = ["main"]
