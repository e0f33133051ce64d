"""Folders of simulated runs, with events in the format of an agent."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

from phalanx.contract import events
from phalanx.contract.events import AnyEvent
from phalanx.launcher.runs.run_folder import RunRecord

START = 1.7e9


def home() -> Path:
    """Of this test."""
    return Path(os.environ["PHALANX_HOME"])


def left(
    name: str, happened: Iterable[AnyEvent], *, code: int | None = 0, ranks: int = 2, where: Path | None = None
) -> RunRecord:
    """Create a finished run in the list of runs."""
    folder = (where or home() / "runs") / name
    folder.mkdir(parents=True)
    files = {"events": [], "samples": []}
    end = START
    for event in happened:
        kind = "samples" if isinstance(event, events.ClusterSample | events.MetricsMeasured) else "events"
        files[kind].append(events.encode(event))
        end = max(end, event.time)
    for kind, lines in files.items():
        if lines:
            (folder / f"{kind}.jsonl").write_bytes(b"".join(lines))
    record = RunRecord(
        id=name,
        pid=1,
        pid_started=-1,  # no process has it: it does not run
        command=["/usr/bin/python3", "-u", "train.py", "--lr", "0.1"],
        cwd="/work",
        folder=str(folder),
        world_size=ranks,
        started=START,
        ended=None if code is None else end,
        code=code,
        host=os.uname().nodename,
    )
    record_at(record)
    return record


def record_at(record: RunRecord, **changes: object) -> None:
    (Path(record.folder) / "run.json").write_text(json.dumps(asdict(replace(record, **changes))))  # type: ignore[arg-type]


def wrote(record: RunRecord, rank: int, text: str, stream: str = "stdout") -> None:
    folder = Path(record.folder) / "attempt_0" / str(rank)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stream}.log").write_text(text)
