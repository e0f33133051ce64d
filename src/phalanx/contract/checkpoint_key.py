"""The key that signs checkpoints: `--checkpoint-key FILE`. Only its path is passed to ranks; every rank reads the
file.
"""

from __future__ import annotations

import os
import shlex
import stat

from phalanx.errors import OptionError

_LEAST, _MOST = 32, 4096  # bytes
_MAKE = "(umask 077; openssl rand -hex 32 > {})"


def read_key(path: str) -> bytes:
    """Return the key in a file that only this user, or root, can read. Raises OptionError, whose message does not
    contain the key.
    """
    quoted = shlex.quote(path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # do not block on a FIFO
    except OSError as error:
        raise OptionError(
            f"the key of the checkpoints cannot be read: {path}: {error.strerror}", fix=_MAKE.format(quoted)
        ) from None
    try:
        _check(path, os.fstat(fd))  # check the opened file, whichever links lead to it
        key = os.read(fd, _MOST + 1).strip()
    except OSError as error:
        raise OptionError(f"the key of the checkpoints cannot be read: {path}: {error.strerror}") from None
    finally:
        os.close(fd)
    if not _LEAST <= len(key) <= _MOST:
        raise OptionError(
            f"the key of the checkpoints in {path} has {len(key)} bytes",
            details=[f"expected {_LEAST} to {_MOST}, drawn at random"],
            fix=_MAKE.format(quoted),
        )
    return key


def _check(path: str, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OptionError(f"the key of the checkpoints is not a regular file: {path}", fix="--checkpoint-key FILE")
    if found.st_uid not in (os.geteuid(), 0):
        raise OptionError(
            f"the key of the checkpoints belongs to another user: {path}",
            details=[f"its owner is user {found.st_uid}, this process runs as user {os.geteuid()}"],
            fix="--checkpoint-key with a file of your own",
        )
    if found.st_mode & 0o077:
        raise OptionError(
            f"the key of the checkpoints is open to other users: {path}",
            details=[
                f"its mode is {stat.S_IMODE(found.st_mode):03o}, 600 was expected",
                "who knows the key can forge checkpoints: if others may have read it, make a new one",
            ],
            fix=f"chmod 600 {shlex.quote(path)}",
        )
