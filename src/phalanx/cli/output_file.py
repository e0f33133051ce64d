"""Writes the file of `phalanx report` or `compare`: atomically, and never over a file that phalanx did not write."""

from __future__ import annotations

import contextlib
import os

from phalanx.errors import LaunchError, UsageError

_HEAD = 2048  # bytes at the start of a file in which the marker is searched


def write(path: str, text: str, *, marker: str, force: bool = False, what: str = "file") -> str:
    """Write `text` to `path` and return the absolute path.

    An existing file is replaced only if `marker` is at its start, as it is in `text`, or with `force`.
    """
    whole = os.path.abspath(path)
    if os.path.isdir(whole):
        raise UsageError(f"{path} is a folder", fix=f"name a file for the {what}, in that folder or elsewhere")
    if os.path.lexists(whole) and not force and not _has_marker(whole, marker):
        raise UsageError(f"{path} exists, and is not a {what} of phalanx", fix="another name, or -f")
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


def _has_marker(path: str, marker: str) -> bool:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return marker.encode() in file.read(_HEAD)
    return False
