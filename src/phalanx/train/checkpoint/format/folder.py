"""The folder of checkpoints: their names, which are complete, who may write, and what killed writers have left.

checkpoints/
  step-000000001200/               one checkpoint; sorted by name is sorted by step
    manifest.json                  the list of its files; written last
    state.json                     all that is not a tensor
    rank-00000.safetensors         what rank 0 wrote
    rank-00000.json                where in that file each part of a tensor is
  .writing-step-000000001300-4f2a  being written, or its writer was killed
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
import stat
from collections.abc import Collection
from dataclasses import dataclass, field

from phalanx.contract.regular_file import kind_of, open_regular, read_regular
from phalanx.errors import CheckpointError
from phalanx.train.checkpoint.format import integrity
from phalanx.train.checkpoint.format.manifest import FORMAT, MANIFEST, Entry, Manifest
from phalanx.train.checkpoint.format.validation import check_manifest

_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?\Z")
_TOKEN = re.compile(r"[0-9a-f]{16}\Z")
LOCK = ".lock"
_WRITING = ".writing-"
_REMOVING = ".removing-"
_held: set[tuple[int, str]] = set()  # (pid, folder) of locks that this process, or a parent, holds


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
        """The name of its folder."""
        return os.path.basename(self.path)


class Folder:
    """The folder of a run's checkpoints. Call `lock` before writing. `key`: signs them; empty: no key."""

    def __init__(self, path: str, key: bytes = b"") -> None:
        self.path = os.path.abspath(path)
        self.key = key
        self._lock: int = -1
        self._mine = (0, "")

    # -- reading

    def names(self) -> list[str]:
        """Return the names of the checkpoints, newest first, without checking them."""
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
        """Return the manifest of a checkpoint. Raises CheckpointError if a file is missing or has the wrong size."""
        file = os.path.join(self.path, name, MANIFEST)
        if os.path.islink(os.path.join(self.path, name)):
            raise CheckpointError(f"{name}: is a link, not a folder")
        try:
            data = read_regular(file)
        except OSError as error:
            raise CheckpointError(f"{name}/{MANIFEST}: {error.strerror}") from None
        manifest = integrity.opened(data, Manifest, f"{name}/{MANIFEST}", self.key)
        if manifest.format != FORMAT:
            raise CheckpointError(f"{name}/{MANIFEST}: format {manifest.format}, this phalanx reads {FORMAT}")
        try:
            check_manifest(manifest)
        except CheckpointError as error:
            raise CheckpointError(f"{name}/{MANIFEST}: {error.what}") from None
        if self.key and manifest.step != order(name)[0]:  # an old checkpoint under a new name
            raise CheckpointError(f"{name}/{MANIFEST}: was signed for step {manifest.step}")
        for entry in manifest.files:
            self._measure(name, entry)
        return manifest

    def info(self, name: str) -> Info:
        """Return the description of a complete checkpoint; raise CheckpointError otherwise."""
        manifest = self.manifest(name)
        path = os.path.join(self.path, name)
        return Info(manifest.step, path, manifest.metrics, manifest.world_size, manifest.time)

    def sorted_out(self, known_bad: Collection[str] = ()) -> tuple[list[Info], list[str]]:
        """Return the complete checkpoints, newest first, and the names of the others."""
        good: list[Info] = []
        bad: list[str] = []
        for name in self.names():
            try:
                info = self.info(name)
            except CheckpointError:
                bad.append(name)
                continue
            if name in known_bad:
                bad.append(name)
            else:
                good.append(info)
        return good, bad

    def size(self, name: str) -> int:
        """Return the bytes of a checkpoint."""
        return sum(entry.size for entry in self.manifest(name).files)

    def free(self) -> int:
        """Return the number of bytes that this user can still write to the disk."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def _measure(self, name: str, entry: Entry) -> None:
        path = os.path.join(self.path, name, entry.name)
        try:
            found = os.lstat(path)
        except OSError as error:
            raise CheckpointError(f"{name}/{entry.name}: {error.strerror}") from None
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{name}/{entry.name}: is {kind_of(path)}, not a regular file")
        size = found.st_size
        if size != entry.size:
            raise CheckpointError(f"{name}/{entry.name}: has {size:,} bytes, {entry.size:,} were written")

    # -- writing

    def lock(self) -> str:
        """Lock the folder for this process, and return a token that other ranks can read there.

        The kernel releases the lock when the process ends, however it ends. A fork does not inherit it.
        """
        try:
            os.makedirs(self.path, exist_ok=True)
            self._take()
            # First remove the leftovers of killed writers: they may be what fills the disk.
            self.sweep()
            token = self._write_token()
        except OSError as error:
            self.close()
            raise CheckpointError(
                f"no checkpoint can be written to {self.path}: {error.strerror}", fix="choose another folder"
            ) from None
        return token

    def _write_token(self) -> str:
        """Write a new token over the old one, which has the same length: that needs no free space on most disks.

        On a full disk the old one is sufficient: the holder of the lock uses it, and no other process can write one.
        """
        token = secrets.token_hex(8)
        try:
            os.pwrite(self._lock, token.encode(), 0)
            os.ftruncate(self._lock, len(token))
            os.fsync(self._lock)  # a network file system shows it to others only afterwards
        except OSError as error:
            old = self.token()
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not _TOKEN.match(old):
                raise
            return old
        return token

    def _take(self) -> None:
        # A process can lock a file twice, and releases it with the first descriptor that it closes.
        self._mine = (os.getpid(), os.path.realpath(self.path))
        if self._mine in _held:
            raise CheckpointError(
                f"checkpoints are already written to {self.path} by this process", fix="close the other Checkpoints"
            )
        fd = open_regular(os.path.join(self.path, LOCK), os.O_RDWR | os.O_CREAT)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # On a file system without locks there is no protection.
            if error.errno in (errno.EACCES, errno.EAGAIN):
                os.close(fd)
                raise CheckpointError(
                    f"another run is writing its checkpoints to {self.path}",
                    fix="use a different folder per run, or end the other run",
                ) from None
        self._lock = fd
        _held.add(self._mine)

    def token(self) -> str:
        """Return the token of the process that writes here."""
        try:
            # Read with the descriptor of the lock: closing any other one of this file would release it.
            if self._lock >= 0:
                return os.pread(self._lock, 64, 0).decode()
            return read_regular(os.path.join(self.path, LOCK)).decode(errors="replace")
        except (OSError, CheckpointError):
            return ""

    def staging(self, step: int, token: str, number: int) -> str:
        """Return the path in which a checkpoint is written before it is committed."""
        return os.path.join(self.path, f"{_WRITING}step-{step:012d}-{token}-{number}")

    def commit(self, staging: str, step: int) -> str:
        """Rename a staged checkpoint to its final name, and return the name."""
        name = f"step-{step:012d}"
        taken = [order(other)[1] for other in self.names() if order(other)[0] == step]
        if taken:
            # A checkpoint of this step exists, valid or not: do not touch it.
            name = f"{name}.{max(taken) + 1}"
        os.rename(staging, os.path.join(self.path, name))
        integrity.sync_folder(self.path)
        return name

    def remove(self, name: str) -> None:
        """Remove a checkpoint. It is renamed first: a partly removed one must not look like a checkpoint."""
        hidden = os.path.join(self.path, f"{_REMOVING}{name}-{secrets.token_hex(4)}")
        os.rename(os.path.join(self.path, name), hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def sweep(self) -> None:
        """Remove the leftovers of killed writers. Call it only with the lock held, before the first write."""
        for name in os.listdir(self.path):
            if name.startswith((_WRITING, _REMOVING)):
                shutil.rmtree(os.path.join(self.path, name), ignore_errors=True)

    def close(self) -> None:
        """Release the lock."""
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                os.close(self._lock)
            self._lock = -1
            _held.discard(self._mine)

    def __del__(self) -> None:
        self.close()


def order(name: str) -> tuple[int, int]:
    """Return the sort key of a name, by age."""
    found = _NAME.match(name)
    return (int(found[1]), int(found[2] or 1)) if found else (-1, 0)
