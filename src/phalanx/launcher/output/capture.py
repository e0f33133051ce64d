"""Copies the output of workers from their pipes into their logs, every byte. The console reads the logs."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import subprocess
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Literal

from phalanx.launcher.output.captured_stream import NAMES, CapturedStream, make_raw, open_log, resize
from phalanx.launcher.output.console.console import Console
from phalanx.launcher.output.console.log_tail import LogTail
from phalanx.launcher.output.console.noise import Noise
from phalanx.launcher.output.filtered_logs import FilteredLogs
from phalanx.launcher.output.filters import Std
from phalanx.launcher.output.log_forwarder import LogForwarder
from phalanx.launcher.output.stream_copier import PIPE_SIZE, LostOutput, StreamCopier

_FORWARD_TIMEOUT = 5.0  # seconds for output to reach the leader after a signal


class OutputCapture:
    """The output of one attempt. Call `open` before a worker starts, `handed_over` after, `drained` at its end.

    It copies in callbacks of the event loop, one large read and one write each, and never waits for the console.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        console: Console,
        *,
        forwarder: LogForwarder | None = None,
        echo: bool = True,
    ) -> None:
        self._loop = loop
        self._console = console
        self._forwarder = forwarder
        self._echo = echo  # output is shown on this node
        self._streams: dict[tuple[int, Std], CapturedStream] = {}
        self._copier = StreamCopier(loop, LostOutput(console.say))
        self._places_shown: set[str] = set()  # places of single-rank failures whose tracebacks were shown

    def duplicate(
        self,
        folder: str,
        *,
        stdout: Collection[str] = (),
        stderr: Collection[str] = (),
        teed: Mapping[int, Std] | None = None,
        headers: Mapping[int, str] | None = None,
    ) -> None:
        """Copy lines that contain a needle to filtered_stdout.log and filtered_stderr.log. Call it before `open`.

        `teed` are the streams of each rank that are searched (None: all), `headers` the prefixes of its lines.
        """
        needles = {std: chosen for std, chosen in ((Std.OUT, stdout), (Std.ERR, stderr)) if chosen}
        if needles:
            self._copier.filtered = FilteredLogs(folder, needles, teed=teed, headers=headers or {})

    def open(
        self,
        rank: int,
        folder: str,
        *,
        show: Std,
        terminal: bool = False,
        apart: bool = False,
        traceback: str | None = None,
    ) -> tuple[int, int]:
        """Return descriptors for a worker's stdout and stderr. With `terminal`, they may be a pseudo-terminal.

        If both are shown in one place they are one stream, which keeps their order; then all of it is in stdout.log.
        `apart`: the user requested separate files. `traceback`: the file with the worker's last traceback, which the
        console withholds until the failure was reported.
        """
        for std, _ in NAMES:
            if (rank, std) in self._streams:  # the worker is replaced; another process may still have its end open
                self._copier.close(self._streams[rank, std])
        if show == Std.ALL and self._echo and self._console.together and not apart and self._copier.filtered is None:
            both = self._open(rank, folder, Std.OUT, show=show, terminal=terminal, traceback=traceback)
            self._streams[rank, Std.ERR] = both
            with contextlib.suppress(OSError):
                os.close(open_log(f"{folder}/{dict(NAMES)[Std.ERR]}.log"))
            streams = [both, both]
        else:
            streams = [
                self._open(rank, folder, std, show=show, terminal=terminal, traceback=file)
                for (std, _), file in zip(NAMES, (None, traceback), strict=True)
            ]
        out, err = (stream.target for stream in streams)
        assert out is not None  # noqa: S101
        assert err is not None  # noqa: S101
        return out, err

    def _open(
        self, rank: int, folder: str, std: Std, *, show: Std, terminal: bool, traceback: str | None
    ) -> CapturedStream:
        shown = bool(show & std)
        replaces = (rank, std) in self._streams
        live = terminal and shown and self._echo and self._console.terminal(std) and not self._console.hidden
        path = f"{folder}/{dict(NAMES)[std]}.log"
        log: int | None = None
        try:
            log = open_log(path)
        except OSError as error:
            self._copier.lost.failed(path, error)
        size = os.fstat(log).st_size if log is not None else 0
        source, target = os.openpty() if live else os.pipe()
        os.set_blocking(source, False)
        if live:
            make_raw(target)
            resize(target, self._console.window(rank, std))
        else:
            with contextlib.suppress(OSError):  # the user's limit for pipe memory may be reached
                fcntl.fcntl(source, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
        stream = CapturedStream(rank, std, path, source, target, live, log, size, size, self._loop.create_future())
        if shown and self._echo:
            stream.followers.append(
                self._console.attach(rank, std, log, size, live=live, traceback=traceback, replaces=replaces)
            )
        if shown and self._forwarder is not None:
            stream.followers.append(self._forwarder.follow(rank, std, log, size, traceback=traceback))
        if self._copier.filtered is not None:
            stream.duplicate = self._copier.filtered.of(rank, std)
        self._streams[rank, std] = stream
        self._copier.start(stream)
        return stream

    def handed_over(self, rank: int) -> None:
        """Close our copies of the worker's ends, so that the stream ends when the worker does."""
        for stream in self._of([rank]):
            if stream.target is not None:
                os.close(stream.target)
                stream.target = None

    def repeats(self, rank: int) -> None:
        """Drop repeated lines, because the worker starts over in the same process."""
        self.catch_up(rank)
        for stream in self._of([rank]):
            stream.start_over()

    def regroups(self, rank: int) -> None:
        """Hide messages of torch and NCCL about a lost peer, because this worker can regroup."""
        for stream in self._of([rank]):
            for follower in stream.followers:
                if isinstance(follower, LogTail) and follower.noise is None:
                    follower.noise = Noise()

    def shown(self, rank: int) -> Literal["no", "without its traceback", "whole"]:
        """Return how the console shows the stderr of a rank."""
        stream = self._streams.get((rank, Std.ERR))
        tails = [one for one in stream.followers if isinstance(one, LogTail)] if stream is not None else []
        if not tails:
            return "no"
        whole = self._console.alone or any(tail.withheld is None for tail in tails)
        return "whole" if whole else "without its traceback"

    def failed(self, rank: int, place: str) -> None:
        """Withhold the traceback of a rank that has failed: a message about the failure follows.

        The traceback of a single rank is shown, but only once: not if an earlier worker has failed at the same `place`.
        """
        if self._console.alone and place not in self._places_shown:
            self._places_shown.add(place)
            self._console.release_withheld([rank])
            return
        for stream in self._of([rank]):
            for follower in stream.followers:
                if isinstance(follower, LogTail):
                    self._console.await_report(follower)
                elif follower.withheld is not None:
                    follower.withheld.await_report()

    def regrouped(self) -> None:
        """Drop the tracebacks of ranks that were replaced: the message about the recovery explains their failure."""
        self._console.drop_withheld(ended=True)
        if self._forwarder is not None:
            self._forwarder.drop_withheld()

    async def settle_forwarded(
        self, *, succeeded: Collection[int], reported: Callable[[str], bool] | None = None
    ) -> None:
        """Send the leader the tracebacks that no message reports: see `LogForwarder.settle`."""
        if self._forwarder is not None:
            await self._forwarder.settle(succeeded=succeeded, reported=reported, timeout=_FORWARD_TIMEOUT)

    def renumber(self, ranks: Mapping[int, int]) -> None:
        """Give live workers new ranks: old -> new."""
        ranks = {old: new for old, new in ranks.items() if old != new}
        moved = {key: stream for key, stream in self._streams.items() if key[0] in ranks}
        self._streams = {key: stream for key, stream in self._streams.items() if key not in moved}
        for (old, std), stream in moved.items():
            replaced = self._streams.get((ranks[old], std))  # of a dead worker
            if replaced is not None:
                self._copier.close(replaced)
            stream.rank = ranks[old]
            self._streams[stream.rank, std] = stream
            for follower in stream.followers:
                if isinstance(follower, LogTail):
                    self._console.renumber(follower, stream.rank)
                else:
                    follower.rank = stream.rank

    async def drained(self, timeout: float, ranks: Collection[int] | None = None) -> list[int]:
        """Wait for the end of all streams, or of those of these ranks.

        Return the ranks of which a process has kept a stream open for `timeout` seconds; it is not read any further.
        """
        streams = self._of(ranks)
        pending = [stream.ended for stream in streams if not stream.ended.done()]
        if pending:
            await asyncio.wait(pending, timeout=timeout)
        held = [stream for stream in streams if not stream.ended.done()]
        for stream in held:
            self._copier.close(stream)
        return sorted({stream.rank for stream in held})

    def catch_up(self, rank: int) -> None:
        """Copy the output of a rank so far."""
        for stream in self._of([rank]):
            self._copier.catch_up(stream)

    def catch_up_all(self) -> None:
        """Copy the output of all ranks so far."""
        for rank in {stream.rank for stream in self._streams.values()}:
            self.catch_up(rank)

    def leave(self) -> None:
        """Make `cat` write the output of processes that outlive us into the logs: a broken pipe would kill them."""
        for stream in self._streams.values():
            if not stream.ended.done() and stream.log is not None:
                os.set_blocking(stream.source, True)
                subprocess.Popen(
                    ["cat"],  # noqa: S607
                    stdin=stream.source,
                    stdout=stream.log,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
                self._copier.end(stream)

    def tail(self, rank: int, stream: Literal["stdout", "stderr"], lines: int) -> list[str]:
        """Return the last lines as plain text, progress bars in their last state."""
        std = Std.OUT if stream == "stdout" else Std.ERR
        found = self._streams.get((rank, std))
        if found is None or (std == Std.OUT and found is self._streams.get((rank, Std.ERR))):
            return []  # one stream for both is reported as stderr
        return found.last_lines(lines)

    def resized(self) -> list[int]:
        """Give the workers' terminals the new size of ours. Return the ranks to which SIGWINCH must be sent.

        The kernel sends it only to processes whose controlling terminal it is.
        """
        resized = set()
        for stream in self._streams.values():
            if stream.pty and not stream.ended.done():
                resize(stream.source, self._console.window(stream.rank, stream.std))
                resized.add(stream.rank)
        return sorted(resized)

    def close(self) -> None:
        """Copy the remaining output, and close all streams."""
        for stream in self._streams.values():
            self._copier.close(stream)
        if self._copier.filtered is not None:
            self._copier.filtered.close()
        self._copier.lost.report()

    def _of(self, ranks: Iterable[int] | None) -> list[CapturedStream]:
        chosen = None if ranks is None else set(ranks)
        streams = dict.fromkeys(self._streams.values())  # a stream for both is listed twice
        return [stream for stream in streams if chosen is None or stream.rank in chosen]
