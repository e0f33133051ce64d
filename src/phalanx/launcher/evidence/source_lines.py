"""Adds the source lines to stack frames in the user's code, on the node that has the files."""

from __future__ import annotations

import contextlib
import functools

import msgspec

from phalanx.diagnose import source
from phalanx.diagnose.evidence import Frame, Rank
from phalanx.diagnose.frames import mine

_LARGEST = 1 << 20  # bytes of a file that is read
_MOST = 300  # frames per report


class Sources:
    """Source files for one report. Files may change, so do not keep it."""

    def __init__(self) -> None:
        self._text = functools.cache(_read)
        self._known: dict[Frame, Frame] = {}

    def annotated(self, rank: Rank) -> Rank:
        """Return the rank with source lines in all its frames."""
        threads = tuple(msgspec.structs.replace(each, frames=self._all(each.frames)) for each in rank.threads)
        calls = tuple(msgspec.structs.replace(each, site=self._all(each.site)) for each in rank.calls)
        history = msgspec.structs.replace(rank.history, sites=tuple(map(self._all, rank.history.sites)))
        return msgspec.structs.replace(rank, threads=threads, calls=calls, history=history)

    def _all(self, frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
        return tuple(self._one(frame) for frame in frames)

    def _one(self, frame: Frame) -> Frame:
        if frame not in self._known:
            text = self._text(frame.file) if mine(frame) and len(self._known) < _MOST else ""
            self._known[frame] = source.annotate(frame, text) if text else frame
        return self._known[frame]


def _read(path: str) -> str:
    with contextlib.suppress(OSError), open(path, errors="replace") as file:
        return file.read(_LARGEST)
    return ""
