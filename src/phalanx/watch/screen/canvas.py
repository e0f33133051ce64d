"""Room to draw in, and the signs that may be used."""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.watch.screen.signs import Signs


@dataclass(frozen=True)
class Canvas:
    width: int
    height: int
    signs: Signs

    def part(self, height: int, width: int | None = None) -> Canvas:
        return replace(self, height=height, width=self.width if width is None else width)
