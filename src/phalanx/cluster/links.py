"""Measured links between hosts. `phalanx doctor` writes them, runs show them.

HOME/links.json has the newest result of each pair of hosts.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Collection, Iterable

import msgspec

from phalanx.contract.events import LinkMeasured

_MOST = 4096  # pairs that are remembered
_LARGEST = 1 << 22  # bytes


class MeasuredLink(msgspec.Struct, frozen=True):
    """A measured link."""

    measured: float  # when
    link: LinkMeasured


_decoder: msgspec.json.Decoder[list[MeasuredLink]] = msgspec.json.Decoder(list[MeasuredLink])


def keep(home: str, found: Iterable[LinkMeasured], now: float) -> None:
    """Store measurements, replacing older ones of the same pairs, atomically. Raises OSError."""
    new = {_pair(link): MeasuredLink(now, link) for link in found}
    if not new:
        return
    known = {**{_pair(old.link): old for old in _read(home)}, **new}
    newest = sorted(known.values(), key=lambda one: one.measured)[-_MOST:]
    os.makedirs(home, mode=0o700, exist_ok=True)
    file, part = tempfile.mkstemp(prefix=".links-", dir=home)  # for the user alone
    try:
        with os.fdopen(file, "wb") as out:
            out.write(msgspec.json.encode(newest))
        os.replace(part, _path(home))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def known(home: str, hosts: Collection[str]) -> tuple[float, tuple[LinkMeasured, ...]] | None:
    """Return the links between these hosts, and when the oldest was measured. None: nothing is known."""
    found = [one for one in _read(home) if one.link.one in hosts and one.link.other in hosts]
    if not found:
        return None
    return min(one.measured for one in found), tuple(one.link for one in found)


def _read(home: str) -> list[MeasuredLink]:
    """Return all stored links. An unreadable file counts as empty."""
    with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError), open(_path(home), "rb") as file:
        return _decoder.decode(file.read(_LARGEST))
    return []


def _path(home: str) -> str:
    return os.path.join(home, "links.json")


def _pair(link: LinkMeasured) -> tuple[str, str]:
    return min(link.one, link.other), max(link.one, link.other)
