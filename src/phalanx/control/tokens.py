"""The token of 256 bits that authenticates nodes: its sources, and its file."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shlex
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from phalanx.errors import TokenError

VARIABLE = "PHALANX_TOKEN"
LENGTH = 64  # hexadecimal digits
EXPORT = f"export {VARIABLE}=$(openssl rand -hex 32), the same on every node"
# A file with other content may have been named by mistake: do not advise to overwrite it.
ANOTHER = (
    "copy node 0's token file, or make one for all nodes: (umask 077; openssl rand -hex 32 > NEW), --token-file NEW"
)
PATIENCE = 2.0  # seconds for another node to finish the file that it has just begun
# Errors of link() on file systems without hard links.
NO_LINKS = {errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EINVAL}


@dataclass(frozen=True)
class Token:
    """The key, and where it was found. Without a key (--no-auth) any node may join."""

    key: bytes = field(repr=False)
    origin: str

    @property
    def fingerprint(self) -> str:
        """A short hash to compare on two machines. It reveals nothing about the key."""
        return hashlib.sha256(b"phalanx token fingerprint\0" + self.key).hexdigest()[:8]

    def __str__(self) -> str:
        return f"{self.origin} (fingerprint {self.fingerprint})" if self.key else self.origin


def find(environ: Mapping[str, str], *, file: str | None, home: str, open_: bool = False) -> Token:
    """Return the token of --no-auth, PHALANX_TOKEN, --token-file, or the user's file, which is created if needed."""
    if open_:
        return Token(b"", "nowhere (--no-auth)")
    text = environ.get(VARIABLE)
    if text is not None:
        return read_text(text, VARIABLE)
    if file is not None:
        return _read_file(file)
    return _own(os.path.join(home, "token"))


def new() -> str:
    """Return the text of a new token."""
    return os.urandom(LENGTH // 2).hex()


def read_text(text: str, origin: str, *, fix: str = EXPORT) -> Token:
    """Parse the token from a text. Error messages never contain the text."""
    text = text.strip()
    if re.fullmatch(r"[0-9a-fA-F]{64}", text):
        return Token(bytes.fromhex(text), origin)
    if not text:
        seen = "it is empty"
    elif len(text) == LENGTH:
        seen = f"it has {LENGTH} characters, but some of them are not hexadecimal digits"
    else:
        seen = f"it has {len(text)} characters"
    raise TokenError(
        f"the token from {origin} is not valid",
        details=[f"{seen}; a token is {LENGTH} hexadecimal digits"],
        fix=fix,
    )


def _own(path: str) -> Token:
    """Return the user's own token. Nodes that share the folder and start at the same time get the same one."""
    try:
        if not os.path.lexists(path):
            _create(path, new())
    except OSError as error:
        raise TokenError(
            f"the token cannot be written to {path}: {error.strerror}",
            details=["nodes join a run with the token, so it must be the same on all of them"],
            fix=f"{EXPORT}, or set PHALANX_HOME to a folder that can be written",
        ) from error
    end = time.monotonic() + PATIENCE
    while True:
        complete = _complete(path)  # check this first: it may be completed during the read
        try:
            return _read_file(path, fix=f"rm {_quoted(path)}   (the next run makes a new one), or {EXPORT}")
        except TokenError:
            # Another node may be writing it, on a file system without hard links; or a network file system does not
            # show the new file yet.
            if complete or time.monotonic() > end:
                raise
        time.sleep(0.02)


def _complete(path: str) -> bool:
    try:
        return os.stat(path).st_size >= LENGTH
    except FileNotFoundError:
        return False
    except OSError:
        return True  # waiting would not help


def _create(path: str, text: str) -> None:
    """Create the file with its whole text, or keep the one that another process created first."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    part = f"{path}.{os.urandom(8).hex()}"
    _write(part, text)
    try:
        os.link(part, path)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        _create_in_place(path, text)
    finally:
        os.unlink(part)


def _create_in_place(path: str, text: str) -> None:
    """Create the file on a file system without hard links. The first process to open it writes it; for an instant the
    others see an empty file.
    """
    with contextlib.suppress(FileExistsError):
        _write(path, text)


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.fchmod(fd, 0o600)  # independent of the umask
        data = f"{text}\n".encode()
        if os.write(fd, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(fd)
    except BaseException:
        os.unlink(path)  # an incomplete token would block every later run
        raise
    finally:
        os.close(fd)


def _read_file(path: str, *, fix: str = ANOTHER) -> Token:
    try:
        # Do not block on a named pipe.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        # Check the opened file, whichever links lead to it.
        _check(path, os.fstat(fd))
        data = os.read(fd, 4096)
    except OSError as error:
        raise _unreadable(path, error) from error
    finally:
        os.close(fd)
    return read_text(data.decode("ascii", "replace"), path, fix=fix)


def _check(path: str, found: os.stat_result) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise TokenError(f"{path} is a folder, not a file with a token", fix=f"--token-file {_quoted(path)}/token")
    if not stat.S_ISREG(found.st_mode):
        raise TokenError(f"{path} is not a plain file with a token", fix=ANOTHER)
    if found.st_uid != os.geteuid():
        raise TokenError(
            f"the token file {path} belongs to another user",
            details=[f"its owner is user {found.st_uid}, this process runs as user {os.geteuid()}"],
            fix=f"keep a copy of your own and name it with --token-file, or {EXPORT}",
        )
    if found.st_mode & 0o077:
        raise TokenError(
            f"the token file {path} is open to other users",
            details=[
                f"its mode is {stat.S_IMODE(found.st_mode):03o}, 600 was expected",
                "anyone who knows the token can run programs as you: if others may have read it, make a new one",
            ],
            fix=f"chmod 600 {_quoted(path)}",
        )


def _unreadable(path: str, error: OSError) -> TokenError:
    if isinstance(error, FileNotFoundError):
        what = f"there is no token file {path}"
        if os.path.islink(path):
            what = f"the token file {path} is a link to a file that is not there"
        make = f"(umask 077; openssl rand -hex 32 > {_quoted(path)})"
        return TokenError(what, fix=f"copy node 0's file there, or make one for all nodes: {make}")
    return TokenError(
        f"the token file {path} cannot be read: {error.strerror}",
        fix=f"make it readable for you alone (chmod 600 {_quoted(path)}), or {EXPORT}",
    )


def _quoted(path: str) -> str:
    return shlex.quote(path)
