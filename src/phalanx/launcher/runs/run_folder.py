"""The folder of a run, and the list of all runs.

RUN/run.json                  command, process, start, end
RUN/metadata.json             commit, hyperparameters, versions, machine: contract/run_metadata.py
RUN/events.jsonl              what happened, one typed event per line
RUN/samples.jsonl             samples of all ranks and metrics, on the leader
RUN/forkserver.log            output of imports
RUN/store-key                 with which ranks sign what they set in the store
RUN/attempt_0/3/stdout.log    output of rank 3, with stderr.log and error.json beside it
RUN/node_1/…                  the same, of another node
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, BinaryIO

from phalanx.contract import home as places
from phalanx.contract.exit_codes import PREEMPTED, stopped_by
from phalanx.forkserver import linux

if TYPE_CHECKING:
    # The folder is created before the fork server starts, so imports here delay every run.
    from phalanx.contract import events


NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)  # the disk is to blame, not the path
_ROOM = 1 << 14  # bytes that a new run folder must accept
_TRIES = 100  # runs with one name that may be created at the same moment


@dataclass(frozen=True)
class RunRecord:
    """The content of run.json."""

    id: str  # unique in the list of runs
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
    name: str = ""  # as given with --name, or the id: several runs may have the same name
    preempted: bool = False  # it ended after a checkpoint, and the same command resumes it

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
            return "killed"  # the agent could not write its end
        if self.preempted:
            return "preempted"
        if stopper := stopped_by(self.code):
            return f"stopped by {stopper}"
        return "done" if self.code == 0 else f"failed ({self.code})"


def make_run_id(target: str) -> str:
    """Return a unique id with the name of the script and the time."""
    name = os.path.splitext(os.path.basename(target.rstrip("/")))[0] or "run"
    clean = "".join(char if char.isalnum() or char in "-_" else "-" for char in name)[:24]
    return f"{clean.lstrip('-') or 'run'}-{time.strftime('%m%d-%H%M%S')}-{os.urandom(2).hex()}"


class RunFolder:
    """The folder of a run that is being written."""

    def __init__(self, path: str, given: str = "") -> None:
        self.path = path
        self.name = os.path.basename(path)  # unique: if the given name is taken, it has a number
        self.given = given or self.name  # the requested name
        self._events = open(os.path.join(path, "events.jsonl"), "ab", buffering=0)  # noqa: SIM115
        self._record: RunRecord | None = None
        self.link: str | None = None  # its entry in the list of runs, if the folder is elsewhere
        self.echo: Callable[[str], None] | None = None  # torchrun's --event-log-handler console
        self.listeners: list[Callable[[bytes], None]] = []  # called with the line of every event
        self._samples: BinaryIO | None = None
        self.tell: Callable[[str], None] | None = None  # reports that the disk no longer accepts files
        self._elsewhere = ""  # folder of new logs since then
        self.note = ""  # why it is in another place
        self.stalled = 0.0  # seconds of stalls that ended by themselves
        self._stalls = False  # the run stalls, and no fault has followed from that
        self._preempted = False  # a checkpoint was written for a preemption

    def record(self, record: RunRecord) -> None:
        """Replace run.json atomically. A full disk or a deleted folder does not end the run."""
        self._record = record
        part = os.path.join(self.path, "run.json.part")
        with contextlib.suppress(OSError):
            with open(part, "w") as file:
                json.dump(asdict(record), file, indent=1)
            os.replace(part, os.path.join(self.path, "run.json"))

    @property
    def recorded(self) -> RunRecord | None:
        """Return the newest content of run.json."""
        return self._record

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
            self.record(replace(self._record, id=name, name=name, folder=path, node=node))

    def resized(self, world_size: int) -> None:
        """Record the number of ranks on all nodes: it is known when all have joined, and may change."""
        if self._record is not None and self._record.world_size != world_size:
            with contextlib.suppress(OSError):  # a full disk must not end the run
                self.record(replace(self._record, world_size=world_size))

    def mark_preempted(self) -> None:
        """Record that the run ends because of a preemption, with a checkpoint."""
        self._preempted = True

    def is_preempted(self, code: int) -> bool:
        """Return whether an end with this exit code is a preemption."""
        return self._preempted and code == PREEMPTED

    def ended(self, code: int) -> str:
        """Record the end of the run. Return its state, as `phalanx ps` shows it."""
        if self._record is None:
            return ""
        self._record = replace(self._record, ended=time.time(), code=code, preempted=self.is_preempted(code))
        self.record(self._record)
        return self._record.state

    def event(self, event: events.Event) -> None:
        """Append an event to events.jsonl and publish it."""
        from phalanx.contract import events

        self._fold(event)
        line = events.encode(event)
        with contextlib.suppress(OSError):  # a full disk must not end the run
            self._events.write(line)
        if self.echo is not None:
            self.echo(line.decode().rstrip())
        for listener in self.listeners:
            listener(line)

    def _fold(self, event: events.Event) -> None:
        from phalanx.contract import events

        match event:
            case events.Stalled():
                self._stalls = True
            case events.FaultEvent():
                self._stalls = False
            case events.Resumed():
                self.stalled += event.seconds if self._stalls else 0.0
                self._stalls = False
            case events.Preempted():
                self.mark_preempted()

    def sample(self, event: events.Event, *, kept: bool = True, published: bool = True) -> int:
        """Send a sample or metrics to viewers (`published`) and append them to samples.jsonl (`kept`).

        Return the size of the line.
        """
        from phalanx.contract import events

        line = events.encode(event)
        if kept:
            with contextlib.suppress(OSError):
                if self._samples is None:
                    self._samples = open(os.path.join(self.path, "samples.jsonl"), "ab", buffering=0)  # noqa: SIM115
                self._samples.write(line)
        for listener in self.listeners if published else ():
            listener(line)
        return len(line)

    def rank_folder(self, attempt: int, rank: str) -> str:
        """Create and return the folder of a rank: named by global rank, so that nodes can share a disk."""
        return self._made(os.path.join(f"attempt_{attempt}", rank))

    def attempt_folder(self, attempt: int) -> str:
        """Create and return the folder of an attempt."""
        return self._made(f"attempt_{attempt}")

    def _made(self, name: str) -> str:
        """Create a folder below this one; if the disk does not accept it, on another disk, so that the run continues.

        If no disk accepts it, return its name anyway: output is then shown and not kept.
        """
        path = os.path.join(self.path, name)
        try:
            os.makedirs(path, exist_ok=True)
            return path
        except OSError as error:
            for other in [self._elsewhere] if self._elsewhere else places.fallbacks(self.path):
                with contextlib.suppress(OSError):
                    found = os.path.join(other, name)
                    os.makedirs(found, exist_ok=True)
                    if not self._elsewhere and self.tell is not None:
                        self.tell(f"{path} cannot be made: {error.strerror}. The run continues, with logs in {other}")
                    self._elsewhere = other
                    return found
        return path

    def open_log(self, name: str) -> int:
        """Open a log file of this folder for appending. If the disk does not accept it, written data is dropped."""
        try:
            path = os.path.join(self.path, name)
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError:
            return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the files."""
        self._events.close()
        if self._samples is not None:
            self._samples.close()


def home(environ: Mapping[str, str]) -> str:
    """Return the folder for runs, warm fork servers and preload hints."""
    return places.home(environ)


def create(run_id: str, *, base: str, log_dir: str | None) -> RunFolder:
    """Create a private run folder. With `log_dir` it is created there, and the list of runs links to it.

    If the disk is full or read-only, it is created on another one, and its `note` says so.
    """
    try:
        return _create(run_id, base=base, log_dir=log_dir)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        for other in places.fallbacks(base):
            with contextlib.suppress(OSError):
                folder = _create(run_id, base=other, log_dir=None)
                folder.note = f"{log_dir or base} cannot be written: {error.strerror}. Runs are kept in {other}/runs"
                return folder
        raise


def _create(run_id: str, *, base: str, log_dir: str | None) -> RunFolder:
    runs = os.path.join(base, "runs")
    os.makedirs(runs, mode=0o700, exist_ok=True)
    name = run_id.replace(os.sep, "-").lstrip(".") or "run"
    where = runs
    if log_dir is not None:
        os.makedirs(log_dir, exist_ok=True)
        where = os.path.abspath(log_dir)
    for free in _names(name, runs, where):
        path = os.path.join(where, free)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, mode=0o700)
            _check_room(path)
            if log_dir is None:
                return RunFolder(path, name)
            link = os.path.join(runs, free)
            try:
                os.symlink(path, link)
            except FileExistsError:  # of a run elsewhere
                os.rmdir(path)
                continue
            folder = RunFolder(path, name)
            folder.link = link
            return folder
    raise FileExistsError(os.path.join(where, name))


def _check_room(path: str) -> None:
    """Raise OSError if the disk does not accept a file with content, and remove the folder: a full disk may still
    accept a folder.
    """
    test = os.path.join(path, ".room")
    try:
        with open(test, "wb", buffering=0) as file:
            if file.write(bytes(_ROOM)) < _ROOM:  # there was room for a part of it
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), test)
        os.unlink(test)
    except OSError:
        import shutil  # here, not above: it would delay the fork server

        shutil.rmtree(path, ignore_errors=True)
        raise


def _names(name: str, *folders: str) -> Iterator[str]:
    """Yield names that may be free: the user's name, then NAME.2 or the number after the highest one in use."""
    yield name
    used = [
        entry[len(name) + 1 :] for folder in folders for entry in os.listdir(folder) if entry.startswith(f"{name}.")
    ]
    highest = max((int(number) for number in used if number.isdecimal() and len(number) < 9), default=1)
    for number in range(highest + 1, highest + _TRIES):
        yield f"{name}.{number}"


def all_runs(base: str) -> Iterator[RunRecord]:
    """Yield all recorded runs, oldest first. Skips unreadable ones."""
    found = []
    for path in _run_paths(base):
        records = list(in_folder(path))
        # Of a run on several nodes, the part of this host, else of the first node.
        found += [record for record in records if record.here][:1] or records[:1]
    # With --log-dir on a shared disk, two links may lead to the same folder.
    yield from sorted({run.folder: run for run in found}.values(), key=lambda run: run.started)


def _run_paths(base: str) -> Iterator[str]:
    """Yield the folders of all runs, with those that were created elsewhere because this disk was full."""
    for home in (base, *places.existing_fallbacks(base)):
        runs = os.path.join(home, "runs")
        for name in os.listdir(runs) if os.path.isdir(runs) else []:
            yield os.path.join(runs, name)


def in_folder(folder: str) -> Iterator[RunRecord]:
    """Yield the records of all nodes in a run folder."""
    parts = [folder]
    with contextlib.suppress(OSError):
        parts += sorted(entry.path for entry in os.scandir(folder) if entry.name.startswith("node_"))
    yield from filter(None, map(read, parts))


def read(folder: str) -> RunRecord | None:
    """Read the record of a run folder, which may have been copied. None if there is none."""
    with contextlib.suppress(OSError, ValueError, TypeError), open(os.path.join(folder, "run.json")) as file:
        return replace(RunRecord(**json.load(file)), folder=os.path.realpath(folder))
    return None
