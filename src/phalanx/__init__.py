"""phalanx: distributed PyTorch training that starts, survives and explains itself."""

from phalanx.version import __version__

__all__ = ["__version__"]
