"""filtered_stdout.log and filtered_stderr.log: the lines of all ranks that contain a needle."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping

from phalanx.launcher.output.captured_stream import NAMES, open_log
from phalanx.launcher.output.filters import Duplicate, Std


class FilteredLogs:
    """Appends the selected lines of all ranks to one log per stream."""

    def __init__(
        self,
        folder: str,
        needles: Mapping[Std, Collection[str]],
        *,
        teed: Mapping[int, Std] | None,
        headers: Mapping[int, str],
    ) -> None:
        self._needles = needles
        self._teed = teed
        self._headers = headers
        self._logs: dict[Std, int] = {}
        for std, name in NAMES:
            if std in needles:
                with contextlib.suppress(OSError):  # a full disk
                    self._logs[std] = open_log(f"{folder}/filtered_{name}.log")

    def of(self, rank: int, std: Std) -> Duplicate | None:
        """Return the object that selects the lines of a stream. None: it is not searched."""
        if std in self._needles and (self._teed is None or self._teed.get(rank, Std.NONE) & std):
            return Duplicate(self._needles[std], self._headers.get(rank, f"[{rank}]:"))
        return None

    def write(self, std: Std, lines: bytes) -> None:
        """Append lines to the log of a stream."""
        if lines and std in self._logs:
            with contextlib.suppress(OSError):
                os.write(self._logs[std], lines)

    def close(self) -> None:
        """Close the logs."""
        for fd in self._logs.values():
            os.close(fd)
        self._logs.clear()
