"""The directory of runs, warm fork servers, tokens and leader files of this user."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping

from phalanx.contract.variables import HOME
from phalanx.errors import LaunchError

_MEMORY = "/dev/shm"  # noqa: S108 - the last resort: it is full only if the memory is


def home(environ: Mapping[str, str]) -> str:
    """Return `preferred`, or a private folder for temporary files if that is not writable or belongs to another user.

    For containers with a read-only root or a user without a home. The folder is created here, so that it is safe.
    Raises LaunchError if PHALANX_HOME belongs to another user, who could make phalanx run their programs as this user.
    """
    path = preferred(environ)
    foreign = _foreign(path)
    if environ.get(HOME):
        if foreign is not None:
            raise LaunchError(
                f"PHALANX_HOME is {path}, and {foreign} belongs to another user",
                details=[f"its owner is user {os.stat(foreign).st_uid}, this process runs as user {os.geteuid()}"],
                fix="set PHALANX_HOME to a folder of your own, or unset it",
            )
        return path
    return path if foreign is None and os.path.isabs(path) and _can_be_made(path) else _temporary()


def _foreign(path: str) -> str | None:
    """Return the folder, or the subfolder with executed files, that another user owns.

    A folder of root is accepted: root can change any file anyway, and owns the volumes of containers.
    """
    for one in (path, *(os.path.join(path, name) for name in ("runs", "warm", "hints"))):
        with contextlib.suppress(OSError):
            if os.stat(one).st_uid not in (os.geteuid(), 0):
                return one
    return None


def preferred(environ: Mapping[str, str]) -> str:
    """Return PHALANX_HOME, or the user's state folder. Nodes with a shared disk find each other here."""
    given = environ.get(HOME)
    if given:
        return os.path.abspath(given)
    state = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):
        state = os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(state, "phalanx")


def fallbacks(path: str) -> Iterator[str]:
    """Yield private folders on other disks, for files of `path` if its disk is full or read-only. They are created
    here. The same `path` always has the same folders.
    """
    for root in _other_disks():
        with contextlib.suppress(OSError, LaunchError):
            found = os.path.join(_private(os.path.join(root, _name())), _fallback_name(path))
            os.makedirs(found, mode=0o700, exist_ok=True)
            yield found


def existing_fallbacks(path: str) -> list[str]:
    """Return the folders of `fallbacks` that exist, without creating any."""
    homes = [os.path.join(root, _name()) for root in _other_disks()]
    found = [(home, os.path.join(home, _fallback_name(path))) for home in homes]
    return [folder for home, folder in found if os.path.isdir(folder) and _is_private(home)]


def _other_disks() -> list[str]:
    import tempfile

    return list(dict.fromkeys((tempfile.gettempdir(), _MEMORY)))


def _fallback_name(path: str) -> str:
    return f"disk-{hashlib.sha256(os.fsencode(path)).hexdigest()[:12]}"


def is_temporary(path: str) -> bool:
    """Return whether `home` had to use a temporary folder."""
    return os.path.basename(path) == _name()


def _can_be_made(path: str) -> bool:
    """Return whether a folder can be created, judging by existing folders, without writing."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)


def _name() -> str:
    return f"phalanx-{os.getuid()}"


def _temporary() -> str:
    """Return a folder with the same name in every terminal of this user. Another user may have taken the name."""
    import tempfile

    return _private(os.path.join(tempfile.gettempdir(), _name()))


def _private(path: str) -> str:
    try:
        os.mkdir(path, mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise LaunchError(
            f"there is no folder to keep runs in: {path}: {error.strerror}",
            details=["the home folder cannot be written either"],
            fix="set PHALANX_HOME to a folder that can be written",
        ) from error
    if not _is_private(path):
        raise LaunchError(
            f"{path} is not safe to keep runs in",
            details=["the home folder cannot be written, and another user can write to this one"],
            fix="set PHALANX_HOME to a folder of your own",
        )
    return path


def _is_private(path: str) -> bool:
    found = os.lstat(path)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
