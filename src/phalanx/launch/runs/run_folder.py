"""The folder of a run: every rank's output, why it failed, what happened; and the list of all runs.

RUN/run.json                          who, what, when, how it ended
RUN/events.jsonl                      what happened, a typed event a line
RUN/samples.jsonl                      what each rank was at, and what was measured: the same, on the node that leads
RUN/forkserver.log                        what imports printed
RUN/attempt_0/3/stdout.log            of rank 3, stderr.log and error.json beside it
RUN/node_1/…                          the same of another node
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
    # The folder is made before the fork server is started, and whatever is imported by then delays it.
    from phalanx.contract import events


_TOLD = (130, 143)  # exit codes of what was told to end, and did: SIGINT, SIGTERM


@dataclass(frozen=True)
class RunRecord:
    """run.json: what `phalanx ps` and `phalanx stop` go by."""

    id: str
    pid: int
    pid_started: int  # a pid alone may have been given to somebody else since
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
        """Whether it runs on this machine: its folder may lie on a disk that several share."""
        return self.host in ("", os.uname().nodename)

    @property
    def alive(self) -> bool:
        return self.here and self.ended is None and linux.start_time(self.pid) == self.pid_started

    @property
    def state(self) -> str:
        if self.alive:
            return "running"
        if self.ended is None and not self.here:
            return f"on {self.host}"
        if self.code is None:
            return "killed"  # the agent had no chance to write its end
        if self.code in _TOLD:
            return f"stopped ({self.code})"
        return "done" if self.code == 0 else f"failed ({self.code})"


def make_run_id(target: str) -> str:
    """Readable, sortable within a day, and unique."""
    name = os.path.splitext(os.path.basename(target.rstrip("/")))[0] or "run"
    clean = "".join(char if char.isalnum() or char in "-_" else "-" for char in name)[:24]
    return f"{clean.lstrip('-') or 'run'}-{time.strftime('%m%d-%H%M%S')}-{os.urandom(2).hex()}"


class RunFolder:
    def __init__(self, path: str) -> None:
        self.path = path
        self.name = os.path.basename(path)  # the run's own name: an id that the user gave may be given twice
        self._events = open(os.path.join(path, "events.jsonl"), "ab", buffering=0)  # noqa: SIM115
        self._record: RunRecord | None = None
        self.link: str | None = None  # in the list of runs, where the folder itself is not
        self.echo: Callable[[str], None] | None = None  # torchrun's --event-log-handler console
        self.listeners: list[Callable[[bytes], None]] = []  # hear every event as it is written, a line each
        self._sights: BinaryIO | None = None

    def record(self, record: RunRecord) -> None:
        """Replace run.json in one step: a reader sees the old one or the new one."""
        self._record = record
        part = os.path.join(self.path, "run.json.part")
        with open(part, "w") as file:
            json.dump(asdict(record), file, indent=1)
        os.replace(part, os.path.join(self.path, "run.json"))

    def join(self, run: str, node: int) -> None:
        """This node is one of several: its folder becomes part of theirs. Where they share a disk they share it."""
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
        if self._record is not None:
            with contextlib.suppress(OSError):  # a full disk, a folder that is gone: it has ended as it has
                self.record(replace(self._record, ended=time.time(), code=code))

    def event(self, event: events.Event) -> None:
        from phalanx.contract import events

        line = events.encode(event)
        with contextlib.suppress(OSError):  # a full disk must not end the run
            self._events.write(line)
        if self.echo is not None:
            self.echo(line.decode().rstrip())
        for listener in self.listeners:
            listener(line)

    def sight(self, event: events.Event, *, kept: bool = True) -> int:
        """What comes all the time: a Sight, or what was measured. `kept`: also for those who look later. Its bytes."""
        from phalanx.contract import events

        line = events.encode(event)
        if kept:
            with contextlib.suppress(OSError):
                if self._sights is None:
                    self._sights = open(os.path.join(self.path, "samples.jsonl"), "ab", buffering=0)  # noqa: SIM115
                self._sights.write(line)
        for listener in self.listeners:
            listener(line)
        return len(line)

    def rank_folder(self, attempt: int, rank: str) -> str:
        """Named by global rank, so that nodes which share the disk do not write over each other."""
        path = os.path.join(self.attempt_folder(attempt), rank)
        os.makedirs(path, exist_ok=True)
        return path

    def attempt_folder(self, attempt: int) -> str:
        return os.path.join(self.path, f"attempt_{attempt}")

    def close(self) -> None:
        self._events.close()
        if self._sights is not None:
            self._sights.close()


def home(environ: Mapping[str, str]) -> str:
    """Where runs, warm fork servers and lessons are kept."""
    return places.home(environ)


def create(run_id: str, *, base: str, log_dir: str | None) -> RunFolder:
    """Make the folder, private to the user. With `--log-dir` it lies there, and the list of runs points to it."""
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
    """A folder that did not exist: a second run with the same id gets a name of its own."""
    for name in (path, *(f"{path}_{os.urandom(3).hex()}" for _ in range(8))):
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, mode=0o700)
            return name
    raise FileExistsError(path)


def _linked(path: str, link: str) -> str | None:
    """A run of the same name elsewhere has that link: one that is not in the list could be neither seen nor stopped."""
    for name in (link, f"{link}_{os.urandom(3).hex()}"):
        with contextlib.suppress(FileExistsError):
            os.symlink(path, name)
            return name
    return None


def all_runs(base: str) -> Iterator[RunRecord]:
    """Every run that is remembered, oldest first; what cannot be read is not a run."""
    runs = os.path.join(base, "runs")
    found = []
    for name in os.listdir(runs) if os.path.isdir(runs) else []:
        records = list(in_folder(os.path.join(runs, name)))
        # Of a run on several nodes, this machine's part of it; else its first node's.
        found += [record for record in records if record.here][:1] or records[:1]
    # With --log-dir on a disk that nodes share, two names may lead to the same folder.
    yield from sorted({run.folder: run for run in found}.values(), key=lambda run: run.started)


def in_folder(folder: str) -> Iterator[RunRecord]:
    """Of all nodes whose part lies in it."""
    parts = [folder]
    with contextlib.suppress(OSError):
        parts += sorted(entry.path for entry in os.scandir(folder) if entry.name.startswith("node_"))
    yield from filter(None, map(read, parts))


def read(folder: str) -> RunRecord | None:
    """The run whose folder that is, wherever it lies now: somebody may have copied it. None: it is no run's."""
    with contextlib.suppress(OSError, ValueError, TypeError), open(os.path.join(folder, "run.json")) as file:
        return replace(RunRecord(**json.load(file)), folder=os.path.realpath(folder))
    return None
