"""A run is forgotten: its folder and its name in the list are removed, and nothing that is not its own."""

from __future__ import annotations

import contextlib
import os
import shutil

from phalanx.errors import LaunchError, UsageError
from phalanx.launch.runs import run_folder
from phalanx.launch.runs.run_folder import RunRecord


def forget(base: str, run: RunRecord) -> None:
    """Refused as long as any part of it may be running: on this machine, or on another that shares the disk."""
    names = _names(base, run)
    if not names:
        raise UsageError(f"{run.id} is not where it was: {run.folder}", fix="phalanx ps --all")
    parts = [part for _, folder in names for part in run_folder.in_folder(folder)]
    for part in parts:
        if part.alive:
            raise UsageError(f"{run.id} is running", fix=f"phalanx stop {run.id}")
        if part.ended is None and not part.here:
            raise UsageError(
                f"{run.id} may be running on {part.host}, which has not written that it ended",
                fix=f"on {part.host}: phalanx ps --forget {run.id}; or remove {part.folder} yourself",
            )
    for path, folder in names:
        try:
            _remove(folder)
            _unlink(os.path.dirname(path), folder)
        except OSError as error:
            raise LaunchError(f"{folder} cannot be removed: {error.strerror}", fix=f"ls -la {folder}") from None


def _names(base: str, run: RunRecord) -> list[tuple[str, str]]:
    """Under which names it is listed, and the folder of each: with --log-dir a name is a link to a folder elsewhere."""
    runs = os.path.join(base, "runs")
    found = []
    for name in os.listdir(runs):
        path = os.path.join(runs, name)
        folder = os.path.realpath(path)
        if any(_same(part, run) for part in run_folder.in_folder(folder)):
            found.append((path, folder))
    return found


def _unlink(runs: str, folder: str) -> None:
    """All names that lead into it."""
    for name in os.listdir(runs):
        path = os.path.join(runs, name)
        if os.path.islink(path) and f"{os.path.realpath(path)}{os.sep}".startswith(f"{folder}{os.sep}"):
            os.unlink(path)


def _same(part: RunRecord, run: RunRecord) -> bool:
    """A copy that somebody has made is another: its folder is where it lies, whatever is recorded there."""
    return part.id == run.id and os.path.realpath(part.folder) == os.path.realpath(run.folder)


def _remove(folder: str) -> None:
    """What it is known by goes last, so that whoever is interrupted can do it again."""
    if not any(run_folder.in_folder(folder)):  # gone with what it was a part of
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
        with contextlib.suppress(OSError):  # others are there
            os.rmdir(os.path.dirname(folder))
