"""A training, and the viewers of it: processes that start and end while it runs."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.common import launchers, processes
from benchmarks.common.launchers import LAUNCHERS
from benchmarks.common.paths import script
from benchmarks.common.processes import ProcessLostError
from phalanx.launcher.runs import run_folder

TIMEOUT = 120.0  # seconds, for a start
LINES, COLUMNS = 40, 120  # of the terminal

_PHALANX = (sys.executable, "-P", "-m", "phalanx")
_LINK = re.compile(r"http://([\w.:]+)/#([\w-]+)")


@dataclass(frozen=True)
class TrainingProgress:
    """The progress of a training."""

    step: int
    time: float  # when that step was done
    cpu: float  # CPU seconds of all ranks until then


class WatchedRun:
    """`phalanx run` of a script that trains until it is stopped."""

    def __init__(self, ranks: int, width: int, batch: int, inherited: Mapping[str, str], folder: str) -> None:
        self.environ = launchers.environment(LAUNCHERS["phalanx"], ranks, inherited, folder) | {"TERM": "xterm"}
        self.folder = folder
        self._files = os.path.join(folder, "progress")
        self._ranks = ranks
        config = {"width": width, "batch": batch, "file": self._files}
        command = [*_PHALANX, "run", "-g", str(ranks), "--cpu", "--page", script("watch.py"), json.dumps(config)]
        self._process = processes.start_logged(command, self.environ, folder)
        self.pid = self._process.pid  # of the agent

    def __enter__(self) -> WatchedRun:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            processes.stop(self._process)

    @property
    def run(self) -> str:
        """The name of the run."""
        return list(run_folder.all_runs(self.environ["PHALANX_HOME"]))[-1].id

    def until(self, steps: int) -> None:
        """Wait until every rank has done `steps` steps."""
        end = time.monotonic() + TIMEOUT
        while min((each.step for each in self._each()), default=0) < steps:
            self.check()
            if time.monotonic() > end:
                raise ProcessLostError(
                    f"no training after {TIMEOUT:.0f} s; its output: {processes.last_output(self.folder)}"
                )
            time.sleep(0.05)

    def progress(self) -> TrainingProgress:
        """Return the progress of rank 0, with the CPU time of all ranks."""
        each = self._each()
        return TrainingProgress(each[0].step, each[0].time, sum(rank.cpu for rank in each))

    def opened(self) -> float:
        """Return the seconds until the page of the run answers; the first request starts its server."""
        with open(os.path.join(self.folder, processes.OUTPUT), errors="replace") as file:
            found = _LINK.search(file.read())
        if found is None:
            raise ProcessLostError(f"the run has printed no link; its output: {processes.last_output(self.folder)}")
        reader, begin = http.client.HTTPConnection(found[1], timeout=TIMEOUT), time.monotonic()
        reader.request("GET", "/")
        reader.getresponse().read()
        took = time.monotonic() - begin
        reader.close()
        return took

    def check(self) -> None:
        """Raise ProcessLostError if the run has ended."""
        if self._process.poll() is not None:
            raise ProcessLostError(
                f"the run ended with code {self._process.returncode}; its output: {processes.last_output(self.folder)}"
            )

    def _each(self) -> list[TrainingProgress]:
        found = []
        for rank in range(self._ranks):
            try:
                with open(f"{self._files}.{rank}", "rb") as file:
                    step, when, cpu = struct.unpack("ddd", file.read(24))
            except (FileNotFoundError, struct.error):  # the rank has not started yet
                return []
            found.append(TrainingProgress(int(step), when, cpu))
        return found


@contextlib.contextmanager
def watched(ranks: int, width: int, batch: int, inherited: Mapping[str, str]) -> Iterator[WatchedRun]:
    """Start a training, and stop it after the block."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        WatchedRun(ranks, width, batch, inherited, folder) as run,
    ):
        run.until(20)
        yield run


# -- viewers


class ViewerProcess(Protocol):
    """A running viewer."""

    pid: int
    seen: int  # bytes that it has sent to its terminal or browser

    def fileno(self) -> int:
        """Return the descriptor to select on."""
        ...

    def read(self) -> None:
        """Count the available bytes."""

    def close(self) -> None:
        """End the viewer."""


class ScreenViewer:
    """`phalanx watch` in a pseudo-terminal."""

    def __init__(self, run: WatchedRun) -> None:
        self._end, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        self._process = subprocess.Popen(
            [*_PHALANX, "watch", run.run],
            env=run.environ,
            cwd=run.folder,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self.pid, self.seen = self._process.pid, 0

    def fileno(self) -> int:
        """Return the descriptor to select on."""
        return self._end

    def read(self) -> None:
        """Count the available bytes."""
        try:
            self.seen += len(os.read(self._end, 1 << 16))
        except OSError:
            raise ProcessLostError(f"`phalanx watch` ended with code {self._process.wait()}") from None

    def close(self) -> None:
        """End the viewer."""
        with contextlib.suppress(OSError):
            os.write(self._end, b"q")
        _end(self._process, self._end)
        os.close(self._end)


class PageViewer:
    """`phalanx watch --page`, and a client that reads its event stream as a browser would."""

    def __init__(self, run: WatchedRun) -> None:
        self._process = subprocess.Popen(
            [*_PHALANX, "watch", run.run, "--page"],
            env=run.environ,
            cwd=run.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.pid, self.seen, self._first = self._process.pid, 0, b""
        self._reader: http.client.HTTPConnection | None = None
        try:
            self._stream = self._enter(*page_link(self._process))
        except BaseException:
            self.close()
            raise

    def _enter(self, address: str, key: str) -> int:
        self._reader = reader = http.client.HTTPConnection(address, timeout=TIMEOUT)
        reader.request("POST", "/enter", body=key, headers={"Origin": f"http://{address}"})
        answer = reader.getresponse()
        answer.read()
        cookie = (answer.headers.get("Set-Cookie") or "").partition(";")[0]
        if answer.status >= 300:
            raise ProcessLostError(f"the page refuses the key: {answer.status} {answer.reason}")
        reader.request("GET", "/live", headers={"Cookie": cookie})
        handle = reader.sock.fileno()  # from here on only the bytes are counted
        os.set_blocking(handle, False)
        return handle

    def fileno(self) -> int:
        """Return the descriptor to select on."""
        return self._stream

    def read(self) -> None:
        """Count the available bytes."""
        data = os.read(self._stream, 1 << 16)
        if not data:
            raise ProcessLostError("the page was closed")
        if not self.seen:  # counted from the first complete update on
            self._first += data
            if b"event: whole" not in self._first:
                return
        self.seen += len(data)

    def close(self) -> None:
        """End the viewer."""
        if self._reader is not None:
            self._reader.close()
        _end(self._process)


def page_link(process: subprocess.Popen[bytes]) -> tuple[str, str]:
    """Read the output of a process until it prints the link of its page; return address and key."""
    output = b""
    for line in process.stdout or ():
        output += line
        if found := _LINK.search(line.decode(errors="replace")):
            return found[1], found[2]
    raise ProcessLostError(f"no link was printed; the output: {output.decode(errors='replace').strip()[-300:]}")


def _end(process: subprocess.Popen[bytes], output: int | None = None) -> None:
    """End a viewer. Its output is read meanwhile: it would block on a terminal that is not read."""
    if output is None:
        process.terminate()
    end = time.monotonic() + 10.0
    while process.poll() is None and time.monotonic() < end:
        if output is not None and select.select([output], [], [], 0.02)[0]:
            with contextlib.suppress(OSError):
                os.read(output, 1 << 16)
        else:
            time.sleep(0.02)
    if process.poll() is None:
        process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def read_for(viewers: Sequence[ViewerProcess], seconds: float) -> None:
    """Read the output of the viewers, for `seconds`."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        ready, _, _ = select.select(list(viewers), [], [], left)
        for viewer in ready:
            viewer.read()


def wait_until_shown(viewers: Sequence[ViewerProcess]) -> None:
    """Wait until every viewer shows something."""
    end = time.monotonic() + TIMEOUT
    while any(not viewer.seen for viewer in viewers):
        read_for(viewers, 0.1)
        if time.monotonic() > end:
            raise ProcessLostError(f"a viewer shows nothing after {TIMEOUT:.0f} s")


VIEWERS: dict[str, tuple[Any, ...]] = {"off": (), "screen": (ScreenViewer,), "page": (PageViewer,), "again": ()}
