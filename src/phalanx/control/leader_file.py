"""Where the tasks of a scheduler find their leader when no name is known: a small file in a shared folder."""

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

LIMIT = 16 * 1024  # bytes of a file, far more than 64 addresses take


@dataclass(frozen=True)
class LeaderFilePath:
    """Where the leader listens: at one of these addresses, of which not all need be reached from everywhere."""

    addresses: tuple[str, ...]
    port: int


class LeaderNotice(msgspec.Struct, frozen=True):
    """The text of the file. Who wrote it, and when, is there for people, and to tell two leaders apart."""

    addresses: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=45)], ...], msgspec.Meta(min_length=1, max_length=64)
    ]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    host: Annotated[str, msgspec.Meta(max_length=256)]
    pid: Annotated[int, msgspec.Meta(ge=1)]
    written: float
    mark: Annotated[str, msgspec.Meta(max_length=64)]


class LeaderFile:
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
        """By the leader. What a dead one left there is replaced; a reader sees the old file or the new one."""
        notice = LeaderNotice(place.addresses, place.port, socket.gethostname(), os.getpid(), time.time(), self.mark)
        data = msgspec.json.encode(notice)
        _decode(data)  # what no member would believe is not written: ValueError
        try:
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            self._replace(data)
        except OSError as error:
            raise JoinError(
                f"the other nodes cannot be told where node 0 is: {self.path}: {error.strerror}",
                fix="set PHALANX_HOME to a folder that all nodes can write, or name node 0: --master ADDRESS",
            ) from error
        if self._notice() is None:
            raise JoinError(
                f"the other nodes would not believe what node 0 wrote to {self.path}",
                details=["the file has to be yours, and nobody else's to write; this file system makes it otherwise"],
                fix="set PHALANX_HOME to another folder that all nodes share, or name node 0: --master ADDRESS",
            )

    def read(self, since: float | None = None) -> LeaderFilePath | None:
        """By a member: None while there is nothing to be believed.

        A file from before `since` is that of an earlier leader. Its time is by the clock of the leader's machine,
        so leave room for clocks that differ.
        """
        notice = self._notice()
        if notice is None or (since is not None and notice.written < since):
            return None
        return LeaderFilePath(notice.addresses, notice.port)

    def close(self) -> None:
        """By the leader: remove the file, unless another one has taken its place."""
        notice = self._notice()
        if notice is not None and notice.mark == self.mark:
            with contextlib.suppress(OSError):
                os.unlink(self.path)

    def _replace(self, data: bytes) -> None:
        part = f"{self.path}.{self.mark}"
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with open(fd, "wb") as file:
                os.fchmod(fd, 0o600)  # whatever the umask took away
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
        raise ValueError(f"{len(data)} bytes are too many for a meeting place")
    notice = msgspec.json.decode(data, type=LeaderNotice)  # msgspec's errors are ValueErrors
    for address in notice.addresses:
        # A scope (fe80::1%eth0) would name an interface of another machine.
        if "%" in address:
            raise ValueError(f"{address} leads nowhere from another machine")
        ipaddress.ip_address(address)
    return notice
