"""The folder of a run, and the list of all runs.

RUN/run.json                  command, process, start, end
RUN/events.jsonl              what happened, one typed event per line
RUN/samples.jsonl             samples of all ranks and metrics, on the leader
RUN/forkserver.log            output of imports
RUN/attempt_0/3/stdout.log    output of rank 3, with stderr.log and error.json beside it
RUN/node_1/…                  the same, of another node
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, BinaryIO

from phalanx.contract import home as places
from phalanx.forkserver import linux

if TYPE_CHECKING:
    # The folder is created before the fork server starts, so imports here delay every run.
    from phalanx.contract import events


_STOPPED = (130, 143)  # exit codes after SIGINT and SIGTERM


@dataclass(frozen=True)
class RunRecord:
    """The content of run.json."""

    id: str
    pid: int
    pid_started: int  # the pid alone may have been reused since
    command: list[str]
    cwd: str
    folder: str
    world_size: int
    started: float
    ended: float | None = None
    code: int | None = None
    host: str = ""
    node: int = 0

    @property
    def here(self) -> bool:
        """Return whether it runs on this host: its folder may be on a shared disk."""
        return self.host in ("", os.uname().nodename)

    @property
    def alive(self) -> bool:
        """Return whether it is running on this host."""
        return self.here and self.ended is None and linux.start_time(self.pid) == self.pid_started

    @property
    def state(self) -> str:
        """Return its state as `phalanx ps` shows it."""
        if self.alive:
            return "running"
        if self.ended is None and not self.here:
            return f"on {self.host}"
        if self.code is None:
            return "killed"  # the agent had no chance to write its end
        if self.code in _STOPPED:
            return f"stopped ({self.code})"
        return "done" if self.code == 0 else f"failed ({self.code})"


def make_run_id(target: str) -> str:
    """Return a unique id with the name of the script and the time."""
    name = os.path.splitext(os.path.basename(target.rstrip("/")))[0] or "run"
    clean = "".join(char if char.isalnum() or char in "-_" else "-" for char in name)[:24]
    return f"{clean.lstrip('-') or 'run'}-{time.strftime('%m%d-%H%M%S')}-{os.urandom(2).hex()}"


class RunFolder:
    """The folder of a run that is being written."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.name = os.path.basename(path)  # unique, while an id that the user gave may be used twice
        self._events = open(os.path.join(path, "events.jsonl"), "ab", buffering=0)  # noqa: SIM115
        self._record: RunRecord | None = None
        self.link: str | None = None  # its entry in the list of runs, if the folder is elsewhere
        self.echo: Callable[[str], None] | None = None  # torchrun's --event-log-handler console
        self.listeners: list[Callable[[bytes], None]] = []  # called with the line of every event
        self._samples: BinaryIO | None = None

    def record(self, record: RunRecord) -> None:
        """Replace run.json atomically."""
        self._record = record
        part = os.path.join(self.path, "run.json.part")
        with open(part, "w") as file:
            json.dump(asdict(record), file, indent=1)
        os.replace(part, os.path.join(self.path, "run.json"))

    def join(self, run: str, node: int) -> None:
        """Move the folder into that of the whole run, as the part of this node. Nodes with a shared disk share it."""
        name = os.path.basename(run.replace(os.sep, "-").lstrip(".")) or "run"
        whole = os.path.join(os.path.dirname(self.path), name)
        os.makedirs(whole, mode=0o700, exist_ok=True)
        path = os.path.join(whole, f"node_{node}")
        if os.path.lexists(path):
            path = f"{path}_{os.urandom(3).hex()}"
        os.rename(self.path, path)
        if self.link is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.link)
            self.link = os.path.join(os.path.dirname(self.link), f"{name}.node_{node}")
            with contextlib.suppress(FileExistsError):
                os.symlink(path, self.link)
        self.path, self.name = path, name
        if self._record is not None:
            self.record(replace(self._record, id=name, folder=path, node=node))

    def ended(self, code: int) -> None:
        """Record the end of the run."""
        if self._record is not None:
            with contextlib.suppress(OSError):  # a full disk, or a deleted folder
                self.record(replace(self._record, ended=time.time(), code=code))

    def event(self, event: events.Event) -> None:
        """Append an event to events.jsonl and publish it."""
        from phalanx.contract import events

        line = events.encode(event)
        with contextlib.suppress(OSError):  # a full disk must not end the run
            self._events.write(line)
        if self.echo is not None:
            self.echo(line.decode().rstrip())
        for listener in self.listeners:
            listener(line)

    def sample(self, event: events.Event, *, kept: bool = True) -> int:
        """Publish a sample or metrics and, with `kept`, append them to samples.jsonl. Return the size of the line."""
        from phalanx.contract import events

        line = events.encode(event)
        if kept:
            with contextlib.suppress(OSError):
                if self._samples is None:
                    self._samples = open(os.path.join(self.path, "samples.jsonl"), "ab", buffering=0)  # noqa: SIM115
                self._samples.write(line)
        for listener in self.listeners:
            listener(line)
        return len(line)

    def rank_folder(self, attempt: int, rank: str) -> str:
        """Create and return the folder of a rank: named by global rank, so that nodes can share a disk."""
        path = os.path.join(self.attempt_folder(attempt), rank)
        os.makedirs(path, exist_ok=True)
        return path

    def attempt_folder(self, attempt: int) -> str:
        """Return the folder of an attempt."""
        return os.path.join(self.path, f"attempt_{attempt}")

    def close(self) -> None:
        """Close the files."""
        self._events.close()
        if self._samples is not None:
            self._samples.close()


def home(environ: Mapping[str, str]) -> str:
    """Return the folder for runs, warm fork servers and preload hints."""
    return places.home(environ)


def create(run_id: str, *, base: str, log_dir: str | None) -> RunFolder:
    """Create a private run folder. With `log_dir` it is created there, and the list of runs links to it."""
    runs = os.path.join(base, "runs")
    os.makedirs(runs, mode=0o700, exist_ok=True)
    name = run_id.replace(os.sep, "-").lstrip(".") or "run"
    if log_dir is None:
        path = _fresh(os.path.join(runs, name))
    else:
        os.makedirs(log_dir, exist_ok=True)
        path = _fresh(os.path.join(os.path.abspath(log_dir), name))
        folder = RunFolder(path)
        folder.link = _linked(path, os.path.join(runs, os.path.basename(path)))
        return folder
    return RunFolder(path)


def _fresh(path: str) -> str:
    """Create a new folder: a second run with the same id gets a suffix."""
    for name in (path, *(f"{path}_{os.urandom(3).hex()}" for _ in range(8))):
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, mode=0o700)
            return name
    raise FileExistsError(path)


def _linked(path: str, link: str) -> str | None:
    """Link the folder in the list of runs, under another name if a run elsewhere has this one."""
    for name in (link, f"{link}_{os.urandom(3).hex()}"):
        with contextlib.suppress(FileExistsError):
            os.symlink(path, name)
            return name
    return None


def all_runs(base: str) -> Iterator[RunRecord]:
    """Yield all recorded runs, oldest first. Skips what is unreadable."""
    runs = os.path.join(base, "runs")
    found = []
    for name in os.listdir(runs) if os.path.isdir(runs) else []:
        records = list(in_folder(os.path.join(runs, name)))
        # Of a run on several nodes, the part of this host, else of the first node.
        found += [record for record in records if record.here][:1] or records[:1]
    # With --log-dir on a shared disk, two links may lead to the same folder.
    yield from sorted({run.folder: run for run in found}.values(), key=lambda run: run.started)


def in_folder(folder: str) -> Iterator[RunRecord]:
    """Yield the records of all nodes in a run folder."""
    parts = [folder]
    with contextlib.suppress(OSError):
        parts += sorted(entry.path for entry in os.scandir(folder) if entry.name.startswith("node_"))
    yield from filter(None, map(read, parts))


def read(folder: str) -> RunRecord | None:
    """Read the record of a run folder, which may have been copied. None if it is none."""
    with contextlib.suppress(OSError, ValueError, TypeError), open(os.path.join(folder, "run.json")) as file:
        return replace(RunRecord(**json.load(file)), folder=os.path.realpath(folder))
    return None
