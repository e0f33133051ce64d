"""What goes wrong with checkpoints."""

from __future__ import annotations

from phalanx.errors import PhalanxError


class CheckpointError(PhalanxError):
    """A checkpoint could not be written, or is not what was written, or does not fit what it is loaded into."""
