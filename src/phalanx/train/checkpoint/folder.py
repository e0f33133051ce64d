"""The folder in which checkpoints are: their names, which are complete, who may write, what is left of the dead.

checkpoints/
  step-000000001200/               one checkpoint; sorted by name is sorted by step
    manifest.json                  the list of its files; written last
    state.json                     whatever is no tensor
    rank-00000.safetensors         what rank 0 wrote
    rank-00000.json                where in that file which part of which tensor is
  .writing-step-000000001300-4f2a  one that is being written, or whose writer was killed
  .lock                            held by rank 0 of the run that saves here
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
from dataclasses import dataclass, field

from phalanx.errors import CheckpointError
from phalanx.train.checkpoint import integrity
from phalanx.train.checkpoint.manifest import FORMAT, MANIFEST, Entry, Manifest

_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?\Z")
_WRITING = ".writing-"
_REMOVING = ".removing-"
_held: set[tuple[int, str]] = set()  # folders whose locks processes have: this one, and those it was forked from


@dataclass(frozen=True)
class Info:
    """A complete checkpoint."""

    step: int
    path: str
    metrics: dict[str, float | None] = field(default_factory=dict)
    world_size: int = 1
    time: float = 0.0
    extra: dict[str, object] = field(default_factory=dict)  # known once it is loaded

    @property
    def name(self) -> str:
        return os.path.basename(self.path)


class Folder:
    """Names and renames. Whoever writes has to `lock` it first."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self._lock: int = -1
        self._mine = (0, "")

    # -- reading

    def names(self) -> list[str]:
        """Of the checkpoints, newest first; not looked into yet."""
        try:
            found = [name for name in os.listdir(self.path) if _NAME.match(name)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"the folder of checkpoints cannot be read: {self.path}: {error.strerror}", fix="choose another folder"
            ) from None
        return sorted(found, key=order, reverse=True)

    def manifest(self, name: str) -> Manifest:
        """Of the checkpoint, whose files are all there and as long as they were. CheckpointError says what is wrong."""
        file = os.path.join(self.path, name, MANIFEST)
        try:
            with open(file, "rb") as opened:
                data = opened.read()
        except OSError as error:
            raise CheckpointError(f"{name}/{MANIFEST}: {error.strerror}") from None
        manifest = integrity.opened(data, Manifest, f"{name}/{MANIFEST}")
        if manifest.format != FORMAT:
            raise CheckpointError(f"{name}/{MANIFEST}: format {manifest.format}, this phalanx reads {FORMAT}")
        for entry in manifest.files:
            self._measure(name, entry)
        return manifest

    def info(self, name: str) -> Info:
        manifest = self.manifest(name)
        path = os.path.join(self.path, name)
        return Info(manifest.step, path, manifest.metrics, manifest.world_size, manifest.time)

    def _measure(self, name: str, entry: Entry) -> None:
        if os.path.basename(entry.name) != entry.name:
            raise CheckpointError(f"{name}/{MANIFEST}: names {entry.name!r}, which is not in its folder")
        try:
            size = os.stat(os.path.join(self.path, name, entry.name)).st_size
        except OSError as error:
            raise CheckpointError(f"{name}/{entry.name}: {error.strerror}") from None
        if size != entry.size:
            raise CheckpointError(f"{name}/{entry.name}: has {size:,} bytes, {entry.size:,} were written")

    # -- writing

    def lock(self) -> str:
        """Take the folder for this process until it ends, and return a token that others can read there.

        The lock is the kernel's: it goes with the process, whatever ended that, and is not inherited by a fork.
        """
        try:
            os.makedirs(self.path, exist_ok=True)
            self._take()
            # What the dead left goes first: it may be what fills the disk.
            self.sweep()
            token = secrets.token_hex(8)
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, token.encode(), 0)
            os.fsync(self._lock)  # a network disk shows it to others only then
        except OSError as error:
            self.close()
            raise CheckpointError(
                f"no checkpoint can be written to {self.path}: {error.strerror}", fix="choose another folder"
            ) from None
        return token

    def _take(self) -> None:
        # The kernel does not keep a process from taking a lock twice, and gives it up with the first that is closed.
        self._mine = (os.getpid(), os.path.realpath(self.path))
        if self._mine in _held:
            raise CheckpointError(
                f"checkpoints are already written to {self.path} by this process", fix="close the other Checkpoints"
            )
        fd = os.open(os.path.join(self.path, ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # A file system without locks is one on which nobody is kept out.
            if error.errno in (errno.EACCES, errno.EAGAIN):
                os.close(fd)
                raise CheckpointError(
                    f"another run is writing its checkpoints to {self.path}",
                    fix="give each run a folder of its own, or end the other",
                ) from None
        self._lock = fd
        _held.add(self._mine)

    def token(self) -> str:
        """Of whoever writes here."""
        try:
            # Read through a descriptor of ours: to close any other of this file would give the lock up.
            if self._lock >= 0:
                return os.pread(self._lock, 64, 0).decode()
            with open(os.path.join(self.path, ".lock")) as file:
                return file.read()
        except OSError:
            return ""

    def staging(self, step: int, token: str, number: int) -> str:
        return os.path.join(self.path, f"{_WRITING}step-{step:012d}-{token}-{number}")

    def commit(self, staging: str, step: int) -> str:
        """One rename makes it a checkpoint. Returns its name."""
        name = f"step-{step:012d}"
        taken = [order(other)[1] for other in self.names() if order(other)[0] == step]
        if taken:
            # Another of this step is there, good or bad: it is not touched.
            name = f"{name}.{max(taken) + 1}"
        os.rename(staging, os.path.join(self.path, name))
        integrity.sync_folder(self.path)
        return name

    def remove(self, name: str) -> None:
        """Out of sight first: a half removed checkpoint is none."""
        hidden = os.path.join(self.path, f"{_REMOVING}{name}-{secrets.token_hex(4)}")
        os.rename(os.path.join(self.path, name), hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def sweep(self) -> None:
        """Remove what dead writers left. Whoever has the lock and has not begun to write knows that all are."""
        for name in os.listdir(self.path):
            if name.startswith((_WRITING, _REMOVING)):
                shutil.rmtree(os.path.join(self.path, name), ignore_errors=True)

    def close(self) -> None:
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                os.close(self._lock)
            self._lock = -1
            _held.discard(self._mine)

    def __del__(self) -> None:
        self.close()


def order(name: str) -> tuple[int, int]:
    """Of names by age."""
    found = _NAME.match(name)
    return (int(found[1]), int(found[2] or 1)) if found else (-1, 0)
