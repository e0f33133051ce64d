"""A training, and who looks at it: processes that come and go while it goes on."""

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

from phalanx.bench import contenders, launch
from phalanx.bench.contenders import CONTENDERS
from phalanx.launch.runs import run_folder

LIMIT = 120.0  # seconds, for a start
LINES, COLUMNS = 40, 120  # of the terminal

_SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "scripts", "watched.py")
_PHALANX = (sys.executable, "-m", "phalanx")
_LINK = re.compile(r"http://([\w.:]+)/#([\w-]+)")


class LostError(Exception):
    """The training or an onlooker is no more, and why."""


@dataclass(frozen=True)
class Progress:
    step: int
    time: float  # when that step was done
    cpu: float  # seconds of all ranks' cores until then


class Watched:
    """`phalanx run` of a script that trains until it is ended."""

    def __init__(self, ranks: int, width: int, batch: int, inherited: Mapping[str, str], folder: str) -> None:
        self.environ = contenders.environment(CONTENDERS["phalanx"], ranks, inherited, folder) | {"TERM": "xterm"}
        self.folder = folder
        self._files = os.path.join(folder, "progress")
        self._ranks = ranks
        told = {"width": width, "batch": batch, "file": self._files}
        line = [*_PHALANX, "run", "-g", str(ranks), "--cpu", "--page", _SCRIPT, json.dumps(told)]
        with open(os.path.join(folder, launch.OUTPUT), "wb") as output:
            self._process = subprocess.Popen(
                line, env=self.environ, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        self.pid = self._process.pid  # of the agent

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            launch.stop(self._process)

    @property
    def run(self) -> str:
        """Its name."""
        return list(run_folder.all_runs(self.environ["PHALANX_HOME"]))[-1].id

    def until(self, steps: int) -> None:
        """Every rank has done so many."""
        end = time.monotonic() + LIMIT
        while min((each.step for each in self._each()), default=0) < steps:
            self.check()
            if time.monotonic() > end:
                raise LostError(f"it does not train after {LIMIT:.0f} s; it said: {launch.said(self.folder)}")
            time.sleep(0.05)

    def progress(self) -> Progress:
        each = self._each()
        return Progress(each[0].step, each[0].time, sum(rank.cpu for rank in each))

    def opened(self) -> float:
        """Seconds until who opens the link of the run itself has an answer: a server is started for the first one."""
        with open(os.path.join(self.folder, launch.OUTPUT), errors="replace") as file:
            found = _LINK.search(file.read())
        if found is None:
            raise LostError(f"the run has printed no link; it said: {launch.said(self.folder)}")
        reader, begin = http.client.HTTPConnection(found[1], timeout=LIMIT), time.monotonic()
        reader.request("GET", "/")
        reader.getresponse().read()
        took = time.monotonic() - begin
        reader.close()
        return took

    def check(self) -> None:
        if self._process.poll() is not None:
            raise LostError(f"it has ended with code {self._process.returncode}; it said: {launch.said(self.folder)}")

    def _each(self) -> list[Progress]:
        found = []
        for rank in range(self._ranks):
            try:
                with open(f"{self._files}.{rank}", "rb") as file:
                    step, when, cpu = struct.unpack("ddd", file.read(24))
            except (FileNotFoundError, struct.error):  # it has not begun yet
                return []
            found.append(Progress(int(step), when, cpu))
        return found


@contextlib.contextmanager
def watched(ranks: int, width: int, batch: int, inherited: Mapping[str, str]) -> Iterator[Watched]:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, Watched(ranks, width, batch, inherited, folder) as run:
        run.until(20)
        yield run


# -- who looks


class Onlooker(Protocol):
    pid: int
    seen: int  # bytes that it has sent to where somebody looks

    def fileno(self) -> int:
        """To be read when something is there."""
        ...

    def read(self) -> None: ...
    def close(self) -> None: ...


class Screen:
    """`phalanx watch` in a terminal, whose other end is ours."""

    def __init__(self, run: Watched) -> None:
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
        return self._end

    def read(self) -> None:
        try:
            self.seen += len(os.read(self._end, 1 << 16))
        except OSError:
            raise LostError(f"the screen has ended with code {self._process.wait()}") from None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._end, b"q")
        _end(self._process, self._end)
        os.close(self._end)


class Page:
    """`phalanx watch --page`, and a reader of it: what a browser on another machine takes from this one."""

    def __init__(self, run: Watched) -> None:
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
            self._stream = self._enter(*link(self._process))
        except BaseException:
            self.close()
            raise

    def _enter(self, address: str, key: str) -> int:
        self._reader = reader = http.client.HTTPConnection(address, timeout=LIMIT)
        reader.request("POST", "/enter", body=key, headers={"Origin": f"http://{address}"})
        answer = reader.getresponse()
        answer.read()
        cookie = (answer.headers.get("Set-Cookie") or "").partition(";")[0]
        if answer.status >= 300:
            raise LostError(f"the page does not let us in: {answer.status} {answer.reason}")
        reader.request("GET", "/live", headers={"Cookie": cookie})
        handle = reader.sock.fileno()  # from here on the bytes are only counted
        os.set_blocking(handle, False)
        return handle

    def fileno(self) -> int:
        return self._stream

    def read(self) -> None:
        data = os.read(self._stream, 1 << 16)
        if not data:
            raise LostError("the page has ended")
        if not self.seen:  # from the first picture on
            self._first += data
            if b"event: whole" not in self._first:
                return
        self.seen += len(data)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        _end(self._process)


def link(process: subprocess.Popen[bytes]) -> tuple[str, str]:
    """Address and key, as a process of ours prints them."""
    said = b""
    for line in process.stdout or ():
        said += line
        if found := _LINK.search(line.decode(errors="replace")):
            return found[1], found[2]
    raise LostError(f"the page has no link; it said: {said.decode(errors='replace').strip()[-300:]}")


def _end(process: subprocess.Popen[bytes], output: int | None = None) -> None:
    """What it still writes is read: a terminal that nobody reads would hold it."""
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


def look(lookers: Sequence[Onlooker], seconds: float) -> None:
    """Read what they send, for so long."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        ready, _, _ = select.select(list(lookers), [], [], left)
        for looker in ready:
            looker.read()


def until_seen(lookers: Sequence[Onlooker]) -> None:
    """All of them show something."""
    end = time.monotonic() + LIMIT
    while any(not looker.seen for looker in lookers):
        look(lookers, 0.1)
        if time.monotonic() > end:
            raise LostError(f"nothing is to be seen after {LIMIT:.0f} s")


def computed(pid: int) -> float:
    """Seconds of a core that a process has had, all its threads together."""
    total = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/task/{thread}/schedstat") as file:
            total += int(file.read().split()[0])
    return total / 1e9


LOOKERS: dict[str, tuple[Any, ...]] = {"off": (), "screen": (Screen,), "page": (Page,), "again": ()}
