"""Finds the run that a command refers to: by name, by the start of its name, or the only one there is.

Several runs may have the same name: they are called NAME, NAME.2, NAME.3. NAME alone means the newest of them, and
NAME.1 the first.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence

from phalanx.cluster.sources.surroundings import environment
from phalanx.errors import UsageError
from phalanx.launcher.runs import run_folder
from phalanx.launcher.runs.run_folder import RunRecord

_LISTED = 10  # candidates in an error message


def find_running(name: str | None, *, verb: str) -> RunRecord:
    """Return a run that is running on this machine. Without a name, return the only one."""
    running = [run for run in _all() if run.alive]
    if name is not None:
        same = [run for run in running if run.name == name]
        if len(same) > 1:  # other commands take the newest run, but this one may end a run
            raise _ambiguous(f"{len(same)} running runs are called {name}", same, verb)
        return _chosen(name, running, verb=verb, how="is running")
    if len(running) == 1:
        return running[0]
    if running:
        raise _ambiguous(f"which run? {len(running)} are running", running, verb)
    raise UsageError("nothing is running", fix="phalanx ps --all shows runs that have ended")


def find(name: str | None, *, verb: str) -> RunRecord:
    """Return a run, running or ended. `name` may be its folder. Without a name: the running one, else the last."""
    if name is not None and os.sep in name:
        return _at(name)
    runs = list(_all())
    if name is not None:
        return _chosen(name, runs, verb=verb, how="is known here")
    running = [run for run in runs if run.alive]
    if len(running) > 1:
        raise _ambiguous(f"which run? {len(running)} are running", running, verb)
    if not runs:
        raise UsageError("no runs yet", fix="phalanx run train.py")
    return (running or runs)[-1]


def find_newest() -> RunRecord:
    """Return the run that was started last, running or ended."""
    runs = _all()
    if not runs:
        raise UsageError("no runs yet", fix="phalanx run train.py")
    return runs[-1]


def find_by_pid(pid: int, folder: str | None = None) -> RunRecord:
    """Return the run whose agent has this process id. Several nodes of a run on one machine share its name.

    A node that was started over ssh may keep its runs in a folder that the environment does not name. `folder` finds
    it.
    """
    there = run_folder.read(folder) if folder is not None and os.sep in folder else None
    for run in ([there] if there is not None else []) + _all():
        if run.pid == pid and run.alive:
            return run
    raise UsageError(f"process {pid} is not the agent of a run", fix="phalanx ps")


@contextlib.contextmanager
def agent_handle(run: RunRecord) -> Iterator[int]:
    """Yield a pidfd of a run's agent: its pid could belong to another process by the time a signal is sent."""
    try:
        process = os.pidfd_open(run.pid)
    except ProcessLookupError:
        raise UsageError(f"{run.id} has ended already", fix="phalanx ps") from None
    try:
        if not run.alive:
            raise UsageError(f"{run.id} has ended already", fix="phalanx ps")
        yield process
    finally:
        os.close(process)


def _all() -> list[RunRecord]:
    return list(run_folder.all_runs(run_folder.home(environment())))


def _at(folder: str) -> RunRecord:
    found = run_folder.read(folder)
    if found is None:
        raise UsageError(f"{folder} is not a run folder: it has no run.json", fix="phalanx ps --all")
    return found


def matching(word: str, runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the runs that a word may mean. `runs` has the oldest first.

    A whole name comes first and means the newest run of that name; then a whole id; then the start of either.
    """
    same = [run for run in runs if run.name == word]
    if same:
        return same[-1:]
    exact = [run for run in runs if word in (run.id, f"{run.id}.1")]
    if exact:
        return exact[-1:]
    found = _starting(word, runs)
    return found[-1:] if len({run.name or run.id for run in found}) == 1 else found


def named(words: Sequence[str]) -> list[RunRecord]:
    """Return all runs, running or ended, whose name starts with one of these words. Each must find a run."""
    runs = _all()
    found = {word: _starting(word, runs) for word in words}
    for word, its in found.items():
        if not its:
            raise _unknown(word, runs, how="is known here")
    return [run for run in runs if any(run in its for its in found.values())]


def _starting(word: str, runs: Sequence[RunRecord]) -> list[RunRecord]:
    return [run for run in runs if run.id.startswith(word) or run.name.startswith(word) or word == f"{run.id}.1"]


def _chosen(word: str, runs: Sequence[RunRecord], *, verb: str, how: str) -> RunRecord:
    found = matching(word, runs)
    if len(found) == 1:
        return found[0]
    if found:
        raise _ambiguous(f"{len(found)} runs start with {word}", found, verb)
    raise _unknown(word, runs, how=how)


def _unknown(word: str, runs: Sequence[RunRecord], *, how: str) -> UsageError:
    names = ", ".join(run.id for run in runs[-5:])
    return UsageError(
        f"no run called {word} {how}",
        details=[f"{'running' if how == 'is running' else 'known'} runs: {names}"] if names else [],
        fix="phalanx ps --all",
    )


def _ambiguous(what: str, found: Sequence[RunRecord], verb: str) -> UsageError:
    """Return an error that lists the candidates, newest first."""
    newest = list(reversed(found))
    again = {run.name for run in found if run.id != run.name}  # these names mean the newest run of that name
    words = [f"{run.id}.1" if run.id in again else run.id for run in newest]
    width = max(map(len, words[:_LISTED]))
    lines = [
        f"{word:<{width}}  {run.state}, started {time.strftime('%m-%d %H:%M:%S', time.localtime(run.started))}"
        for word, run in zip(words[:_LISTED], newest, strict=False)
    ]
    if len(newest) > _LISTED:
        lines.append(f"… {len(newest) - _LISTED} more")
    return UsageError(what, details=lines, fix=f"phalanx {verb} {words[0]}")
