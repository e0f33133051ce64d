"""The error of a failed command as one line of JSON on stderr, for programs that start `phalanx run`.

It is written after the readable message if PHALANX_ERROR_FORMAT is "json". `phalanx doctor` reads it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import msgspec

from phalanx.contract import encoding
from phalanx.contract.variables import ERROR_FORMAT
from phalanx.errors import JoinError, PhalanxError

MARK = "phalanx-error "  # other programs write to stderr as well

_forced = False


class HostProblem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why one host cannot take part."""

    host: str
    what: str
    details: tuple[str, ...] = ()
    fix: str = ""


class ErrorReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A PhalanxError."""

    what: str
    details: tuple[str, ...] = ()
    fix: str = ""
    hosts: tuple[HostProblem, ...] = ()  # if it concerns single hosts


_decoder: msgspec.json.Decoder[ErrorReport] = msgspec.json.Decoder(ErrorReport)


def enable(environ: Mapping[str, str]) -> None:
    """Write errors of this process as JSON if `environ`, which another machine has sent, requests it."""
    global _forced
    _forced = _asked(environ)


def write(error: PhalanxError, environ: Mapping[str, str]) -> None:
    """Write the line, if it is requested."""
    if _forced or _asked(environ):
        sys.stderr.write(line(error))


def line(error: PhalanxError) -> str:
    """Return the error as one line."""
    by_host = error.by_host if isinstance(error, JoinError) else {}
    hosts = tuple(
        HostProblem(host=host, what=one.what, details=one.details, fix=one.fix) for host, one in by_host.items()
    )
    report = ErrorReport(what=error.what, details=error.details, fix=error.fix, hosts=hosts)
    return f"{MARK}{encoding.encode(report).decode()}\n"


def find(output: bytes) -> list[ErrorReport]:
    """Return all reports in the output of a program."""
    found = []
    for text in output.splitlines():
        _, mark, content = text.partition(MARK.encode())
        if mark:
            try:
                found.append(_decoder.decode(content))
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
    return found


def _asked(environ: Mapping[str, str]) -> bool:
    return environ.get(ERROR_FORMAT) == "json"
