"""The folder of runs, warm fork servers, tokens and leader files of this user."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from phalanx.contract.variables import HOME
from phalanx.errors import LaunchError


def home(environ: Mapping[str, str]) -> str:
    """Return `preferred`, or a private folder for temporary files if that cannot be written.

    For containers with a read-only root or a user without a home. The folder is created here, so that it is safe.
    """
    path = preferred(environ)
    return path if environ.get(HOME) or (os.path.isabs(path) and _can_be_made(path)) else _temporary()


def preferred(environ: Mapping[str, str]) -> str:
    """Return PHALANX_HOME, or the user's state folder. Nodes with a shared disk find each other here."""
    given = environ.get(HOME)
    if given:
        return os.path.abspath(given)
    state = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):
        state = os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(state, "phalanx")


def is_temporary(path: str) -> bool:
    """Return whether `home` had to use a temporary folder."""
    return os.path.basename(path) == _name()


def _can_be_made(path: str) -> bool:
    """Return whether a folder can be created, judged by what exists: nothing is written."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)


def _name() -> str:
    return f"phalanx-{os.getuid()}"


def _temporary() -> str:
    """Return a folder whose name is the same in every terminal of this user, so another user may have taken it."""
    import tempfile

    path = os.path.join(tempfile.gettempdir(), _name())
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
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise LaunchError(
            f"{path} is not safe to keep runs in",
            details=["the home folder cannot be written, and another user can write to this one"],
            fix="set PHALANX_HOME to a folder of your own",
        )
    return path
