"""Finds the run that a command is about: by name, by the start of its name, or the only one there is."""

from __future__ import annotations

import os

from phalanx.cluster.sources.surroundings import environment
from phalanx.errors import UsageError
from phalanx.launcher.runs import run_folder
from phalanx.launcher.runs.run_folder import RunRecord


def find_running(name: str | None, *, verb: str) -> RunRecord:
    """Return a run that is running on this machine; without a name, the only one."""
    running = [run for run in _all() if run.alive]
    if name is not None:
        return _named(name, running, "is running")
    if len(running) == 1:
        return running[0]
    names = [run.id for run in running]
    raise UsageError(
        "which run?" if running else "nothing is running",
        details=names,
        fix=f"phalanx {verb} {names[-1]}" if names else "phalanx ps --all shows runs that have ended",
    )


def find(name: str | None, *, verb: str) -> RunRecord:
    """Return a run, running or ended. `name` may be its folder; without a name, the running one, else the last."""
    if name is not None and os.sep in name:
        return _at(name)
    runs = list(_all())
    if name is not None:
        return _named(name, runs, "is known here")
    running = [run for run in runs if run.alive]
    if len(running) > 1:
        raise UsageError("which run?", details=[run.id for run in running], fix=f"phalanx {verb} {running[-1].id}")
    if not runs:
        raise UsageError("no runs yet", fix="phalanx run train.py")
    return (running or runs)[-1]


def find_by_pid(pid: int, folder: str | None = None) -> RunRecord:
    """Return the run whose agent has this process id: several nodes of a run on one machine share its name.

    A node that was started over ssh may keep its runs in a place that the environment does not name. Then `folder`
    finds it.
    """
    there = run_folder.read(folder) if folder is not None and os.sep in folder else None
    for run in ([there] if there is not None else []) + _all():
        if run.pid == pid and run.alive:
            return run
    raise UsageError(f"process {pid} is not the agent of a run", fix="phalanx ps")


def _all() -> list[RunRecord]:
    return list(run_folder.all_runs(run_folder.home(environment())))


def _at(folder: str) -> RunRecord:
    found = run_folder.read(folder)
    if found is None:
        raise UsageError(f"{folder} is not a run folder: it has no run.json", fix="phalanx ps --all")
    return found


def _named(name: str, runs: list[RunRecord], how: str) -> RunRecord:
    found = [run for run in runs if run.id == name] or [run for run in runs if run.id.startswith(name)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(run.id for run in runs[-5:])
    raise UsageError(
        f"{len(found)} runs start with {name}" if found else f"no run called {name} {how}",
        details=[run.id for run in found] or [f"known runs: {names or 'none'}"],
        fix="phalanx ps --all",
    )
