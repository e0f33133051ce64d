"""The area to draw in."""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.watch.screen.signs import Signs


@dataclass(frozen=True)
class Canvas:
    """Width, height, and the symbols that may be used."""

    width: int
    height: int
    signs: Signs

    def part(self, height: int, width: int | None = None) -> Canvas:
        """Return a part of the area."""
        return replace(self, height=height, width=self.width if width is None else width)
