"""Which run is meant: by its name, the beginning of it, or because there is no other."""

from __future__ import annotations

import os

from phalanx.cluster.sources.surroundings import environment
from phalanx.errors import UsageError
from phalanx.launch.runs import run_folder
from phalanx.launch.runs.run_folder import RunRecord


def running(name: str | None, *, verb: str) -> RunRecord:
    """One that runs on this machine."""
    living = [run for run in _all() if run.alive]
    if name is not None:
        return _named(name, living, "is running")
    if len(living) == 1:
        return living[0]
    names = [run.id for run in living]
    raise UsageError(
        "which run?" if living else "nothing is running",
        details=names,
        fix=f"phalanx {verb} {names[-1]}" if names else "phalanx ps --all shows runs that have ended",
    )


def any_run(name: str | None, *, verb: str) -> RunRecord:
    """One that runs, or has ended: without a name the one that runs, else the last. A path is its folder."""
    if name is not None and os.sep in name:
        return _at(name)
    runs = list(_all())
    if name is not None:
        return _named(name, runs, "is known here")
    living = [run for run in runs if run.alive]
    if len(living) > 1:
        raise UsageError("which run?", details=[run.id for run in living], fix=f"phalanx {verb} {living[-1].id}")
    if not runs:
        raise UsageError("no runs yet", fix="phalanx run train.py")
    return (living or runs)[-1]


def by_pid(pid: int, folder: str | None = None) -> RunRecord:
    """The run of an agent on this machine: nodes of one run have one name. A node that was started by ssh has been
    told where runs are kept, and its environment does not say so: then only the folder does."""
    there = run_folder.read(folder) if folder is not None and os.sep in folder else None
    for run in ([there] if there is not None else []) + _all():
        if run.pid == pid and run.alive:
            return run
    raise UsageError(f"process {pid} supervises no run", fix="phalanx ps")


def _all() -> list[RunRecord]:
    return list(run_folder.all_runs(run_folder.home(environment())))


def _at(folder: str) -> RunRecord:
    found = run_folder.read(folder)
    if found is None:
        raise UsageError(f"{folder} is no folder of a run: it has no run.json", fix="phalanx ps --all")
    return found


def _named(name: str, runs: list[RunRecord], how: str) -> RunRecord:
    found = [run for run in runs if run.id == name] or [run for run in runs if run.id.startswith(name)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(run.id for run in runs[-5:])
    raise UsageError(
        f"{name} is the beginning of {len(found)} runs" if found else f"no run called {name} {how}",
        details=[run.id for run in found] or [f"there is: {names or 'nothing'}"],
        fix="phalanx ps --all",
    )
