"""A file for people: it appears whole or not at all, and never in place of something that is not ours."""

from __future__ import annotations

import contextlib
import os

from phalanx.errors import LaunchError, UsageError

_HEAD = 2048  # bytes in which a file says whose it is


def write(path: str, text: str, *, sign: str, force: bool = False, what: str = "file") -> str:
    """Where it lies. A file that is there already is replaced if `sign` stands in its beginning, as in `text`."""
    whole = os.path.abspath(path)
    if os.path.isdir(whole):
        raise UsageError(f"{path} is a folder", fix=f"name a file for the {what}, in that folder or elsewhere")
    if os.path.lexists(whole) and not force and not _ours(whole, sign):
        raise UsageError(f"{path} is there already, and is no {what} of phalanx", fix="another name, or -f")
    part = f"{whole}.{os.urandom(4).hex()}.part"
    try:
        with open(part, "x", encoding="utf-8") as file:
            file.write(text)
        os.replace(part, whole)
    except OSError as error:
        raise LaunchError(
            f"{path} cannot be written: {error.strerror}", fix="another place: a folder that exists and is yours"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(part)
    return whole


def _ours(path: str, sign: str) -> bool:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return sign.encode() in file.read(_HEAD)
    return False
