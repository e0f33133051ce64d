"""The runs of this machine for `phalanx ui`, from their folders.

A summary is read again only when the files of a run have changed: a list of hundreds of runs is requested every other
second.
"""

from __future__ import annotations

import hashlib
import math
import os
import shlex
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.contract import run_metadata
from phalanx.contract.run_metadata import RunMetadata
from phalanx.errors import UsageError
from phalanx.launcher.runs import deletion, history, metadata, recorded_metrics, run_folder, summary
from phalanx.launcher.runs.run_folder import RunRecord
from phalanx.launcher.runs.summary import RunSummary
from phalanx.launcher.viewers import views
from phalanx.watch.html.comparison import ComparedRun, ComparedRunBuilder
from phalanx.watch.model.status import STOPPED
from phalanx.watch.run_list import RunEntry, RunKind
from phalanx.watch.source import Source

_FILES = ("run.json", "events.jsonl", "samples.jsonl", recorded_metrics.FILE, run_metadata.FILE)
_REMEMBERED = 16  # compared runs

Signature = tuple[tuple[int, int], ...]  # time and size of each file


@dataclass(frozen=True)
class _Read:
    signature: Signature
    facts: RunSummary
    metadata: RunMetadata | None


class LocalRunList:
    """The runs below `base`. With `read_only`, none can be deleted."""

    def __init__(self, base: str, *, read_only: bool = False) -> None:
        self._base = base
        self._read_only = read_only
        self._read: dict[str, _Read] = {}  # by folder
        self._compared: dict[str, tuple[Signature, ComparedRun]] = {}  # by folder, the latest last
        self._lock = threading.Lock()  # a server calls from several threads

    def entries(self) -> list[RunEntry]:
        """Return all runs, the newest first."""
        records = list(run_folder.all_runs(self._base))
        with self._lock:
            known = {record.folder for record in records}
            self._read = {folder: read for folder, read in self._read.items() if folder in known}
            return [self._entry(record) for record in reversed(records)]

    def source(self, key: str) -> Source:
        """Return the source from which a viewer reads a run."""
        return views.of(self._find(key))

    def compared(self, key: str) -> ComparedRun:
        """Return a run in the form used for comparison."""
        record = history.leader_record(self._find(key))
        signature = _signature(record.folder)
        with self._lock:
            known = self._compared.get(record.folder)
            if known is not None and known[0] == signature:
                return known[1]
        builder = ComparedRunBuilder(record.id)
        history.read(record, builder.apply)
        compared = builder.build(_state(record)[1])
        with self._lock:
            self._compared[record.folder] = (signature, compared)
            while len(self._compared) > _REMEMBERED:
                del self._compared[next(iter(self._compared))]
        return compared

    def delete(self, key: str) -> None:
        """Delete a run that has ended. Raises UsageError, LaunchError."""
        record = self._find(key)
        if self._read_only:
            raise UsageError(
                "this page is not on loopback: it cannot delete runs", fix=f"phalanx ps --forget {record.id}"
            )
        if not self._inside(record):
            raise UsageError(
                f"the folder of {record.id} is not below {os.path.join(self._base, 'runs')}: {record.folder}",
                fix=f"phalanx ps --forget {record.id}",
            )
        deletion.delete(self._base, record)

    def _find(self, key: str) -> RunRecord:
        for record in run_folder.all_runs(self._base):
            if _key(record) == key:
                return record
        raise UsageError("this run is no longer in the list", fix="phalanx ps --all")

    def _inside(self, record: RunRecord) -> bool:
        """Return whether the folder itself is in the list of runs. With --log-dir it is a link to another place."""
        whole = history.leader_record(record).folder
        runs = os.path.realpath(os.path.join(self._base, "runs"))
        path = os.path.join(runs, os.path.basename(whole))
        return os.path.dirname(whole) == runs and os.path.isdir(path) and not os.path.islink(path)

    def _entry(self, record: RunRecord) -> RunEntry:
        kind, state = _state(record)
        read = self._facts(record)
        loss = read.facts.loss
        return RunEntry(
            key=_key(record),
            name=record.id,
            state=state,
            kind=kind,
            started=record.started,
            ended=record.ended,
            ranks=record.world_size,
            step=read.facts.step,
            loss=loss if loss is not None and math.isfinite(loss) else None,
            faults=read.facts.faults,
            why=read.facts.why if kind in ("failed", "killed") else "",
            command=_command(record.command),
            folder=record.folder,
            host=record.host,
            deletable=not self._read_only and kind not in ("running", "elsewhere") and self._inside(record),
            metadata=read.metadata,
        )

    def _facts(self, record: RunRecord) -> _Read:
        folder = history.leader_record(record).folder
        signature = _signature(folder)
        known = self._read.get(record.folder)
        if known is None or known.signature != signature:
            known = self._read[record.folder] = _Read(signature, summary.of(record), _metadata(folder))
        return known


def _key(record: RunRecord) -> str:
    return hashlib.sha256(os.fsencode(record.folder)).hexdigest()[:16]


def _signature(folder: str) -> Signature:
    found = []
    for name in _FILES:
        try:
            facts = os.stat(os.path.join(folder, name))
            found.append((facts.st_mtime_ns, facts.st_size))
        except OSError:
            found.append((0, -1))
    return tuple(found)


def _metadata(folder: str) -> RunMetadata | None:
    """Return the metadata of a run without the diff. None: of an older version, or unreadable."""
    found = metadata.read(folder)
    return metadata.without_diff(found) if found is not None else None


def _state(record: RunRecord) -> tuple[RunKind, str]:
    """Return the state of a run, and its description."""
    if record.alive:
        return "running", "running"
    if record.ended is None and not record.here:
        return "elsewhere", record.state
    if record.code is None:
        return "killed", "killed"
    if record.preempted or record.code in STOPPED:
        return "stopped", record.state
    return ("done", "done") if record.code == 0 else ("failed", f"failed (exit code {record.code})")


def _command(words: Sequence[str]) -> str:
    """Return the command without the interpreter."""
    shown = list(words)
    if shown and os.path.basename(shown[0]).startswith("python"):
        shown = shown[2:] if shown[1:2] == ["-u"] else shown[1:]
    return shlex.join(shown or words)
