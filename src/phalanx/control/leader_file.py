"""The file in a shared folder through which the tasks of a scheduler find their leader."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import stat
import time
from dataclasses import dataclass
from typing import Annotated

import msgspec

from phalanx.errors import JoinError, UsageError

LIMIT = 16 * 1024  # bytes of a file, far more than 64 addresses need


@dataclass(frozen=True)
class LeaderFilePath:
    """The addresses and the port of the leader. Not all addresses need to be reachable from everywhere."""

    addresses: tuple[str, ...]
    port: int


class LeaderNotice(msgspec.Struct, frozen=True):
    """The content of the file. Host, pid and time are for readers; `mark` distinguishes two leaders."""

    addresses: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=45)], ...], msgspec.Meta(min_length=1, max_length=64)
    ]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    host: Annotated[str, msgspec.Meta(max_length=256)]
    pid: Annotated[int, msgspec.Meta(ge=1)]
    written: float
    mark: Annotated[str, msgspec.Meta(max_length=64)]


class LeaderFile:
    """The file of one job."""

    def __init__(self, folder: str, job: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.,@+=-]{0,199}", job):
            raise UsageError(
                f"the job's id {job[:60]!r} cannot be the name of a file",
                details=["letters, digits and _ . , @ + = - are expected, 200 at most, a letter, digit or _ first"],
                fix="give the run another id: phalanx run --rdzv-id NAME …",
            )
        self.folder = folder
        self.path = os.path.join(folder, f"{job}.json")
        self.mark = os.urandom(16).hex()

    def announce(self, place: LeaderFilePath) -> None:
        """Write the file, as the leader. Replaces that of a dead leader, atomically."""
        notice = LeaderNotice(place.addresses, place.port, socket.gethostname(), os.getpid(), time.time(), self.mark)
        data = msgspec.json.encode(notice)
        _decode(data)  # raises ValueError for content that no member would trust
        try:
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            self._replace(data)
        except OSError as error:
            raise JoinError(
                f"cannot announce the address of node 0 to the other nodes: {self.path}: {error.strerror}",
                fix="set PHALANX_HOME to a folder that all nodes can write, or name node 0: --master ADDRESS",
            ) from error
        if self._notice() is None:
            raise JoinError(
                f"the other nodes would not trust what node 0 wrote to {self.path}",
                details=["only you may own and write the file, which this file system does not allow"],
                fix="set PHALANX_HOME to another folder that all nodes share, or name node 0: --master ADDRESS",
            )

    def read(self, since: float | None = None) -> LeaderFilePath | None:
        """Return the address of the leader, as a member; None if there is no valid file.

        A file written before `since` is that of an earlier leader. The time is from the leader's clock, so tolerate
        clocks that differ.
        """
        notice = self._notice()
        if notice is None or (since is not None and notice.written < since):
            return None
        return LeaderFilePath(notice.addresses, notice.port)

    def close(self) -> None:
        """Remove the file, as the leader, unless another one has replaced it."""
        notice = self._notice()
        if notice is not None and notice.mark == self.mark:
            with contextlib.suppress(OSError):
                os.unlink(self.path)

    def _replace(self, data: bytes) -> None:
        part = f"{self.path}.{self.mark}"
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with open(fd, "wb") as file:
                os.fchmod(fd, 0o600)  # independent of the umask
                file.write(data)
                file.flush()
                os.fsync(fd)
            os.replace(part, self.path)
        except BaseException:
            os.unlink(part)
            raise

    def _notice(self) -> LeaderNotice | None:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
                return None
            return _decode(os.read(fd, LIMIT + 1))
        except (OSError, ValueError):
            return None
        finally:
            os.close(fd)


def _decode(data: bytes) -> LeaderNotice:
    if len(data) > LIMIT:
        raise ValueError(f"{len(data)} bytes are too many")
    notice = msgspec.json.decode(data, type=LeaderNotice)  # msgspec's errors are ValueErrors
    for address in notice.addresses:
        # A scope (fe80::1%eth0) would name an interface of another machine.
        if "%" in address:
            raise ValueError(f"{address} cannot be reached from another machine")
        ipaddress.ip_address(address)
    return notice
