"""Deletes a run: its folder and its entries in the list of runs, and nothing else."""

from __future__ import annotations

import contextlib
import os
import shutil

from phalanx.errors import LaunchError, UsageError
from phalanx.launcher.runs import run_folder
from phalanx.launcher.runs.run_folder import RunRecord


def delete(base: str, run: RunRecord) -> None:
    """Delete a run. Raises UsageError if any part of it may be running, here or on a host that shares the disk."""
    names = _names(base, run)
    if not names:
        raise UsageError(f"{run.id} is no longer at {run.folder}", fix="phalanx ps --all")
    parts = [part for _, folder in names for part in run_folder.in_folder(folder)]
    for part in parts:
        if part.alive:
            raise UsageError(f"{run.id} is running", fix=f"phalanx stop {run.id}")
        if part.ended is None and not part.here:
            raise UsageError(
                f"{run.id} may still be running on {part.host}: its end is not recorded",
                fix=f"on {part.host}: phalanx ps --forget {run.id}; or remove {part.folder} yourself",
            )
    for path, folder in names:
        try:
            _remove(folder)
            _unlink(os.path.dirname(path), folder)
        except OSError as error:
            raise LaunchError(f"{folder} cannot be removed: {error.strerror}", fix=f"ls -la {folder}") from None


def _names(base: str, run: RunRecord) -> list[tuple[str, str]]:
    """Return the entries of a run in the list, with their folders: with --log-dir an entry is a link."""
    runs = os.path.join(base, "runs")
    found = []
    for name in os.listdir(runs):
        path = os.path.join(runs, name)
        folder = os.path.realpath(path)
        if any(_same(part, run) for part in run_folder.in_folder(folder)):
            found.append((path, folder))
    return found


def _unlink(runs: str, folder: str) -> None:
    """Remove all links into the folder."""
    for name in os.listdir(runs):
        path = os.path.join(runs, name)
        if os.path.islink(path) and f"{os.path.realpath(path)}{os.sep}".startswith(f"{folder}{os.sep}"):
            os.unlink(path)


def _same(part: RunRecord, run: RunRecord) -> bool:
    """Return whether two records belong to the same run. A copy of its folder is another run."""
    return part.id == run.id and os.path.realpath(part.folder) == os.path.realpath(run.folder)


def _remove(folder: str) -> None:
    """Remove a run folder; run.json last, so that an interrupted deletion can be repeated."""
    if not any(run_folder.in_folder(folder)):  # removed with the folder that contained it
        return
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        elif entry.name != "run.json":
            os.unlink(entry.path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, "run.json"))
    os.rmdir(folder)
    if os.path.basename(folder).startswith("node_"):  # a part of a run in --log-dir
        with contextlib.suppress(OSError):  # the parts of other nodes still exist
            os.rmdir(os.path.dirname(folder))
