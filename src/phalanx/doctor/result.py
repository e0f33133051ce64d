"""The result of a survey of several nodes, as it is written to a file."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field

import msgspec

from phalanx.doctor.finding import Finding
from phalanx.doctor.pairs import Collective, HostPair

MARK = "phalanx-doctor-result "  # precedes the result in the output, for a first node that shares no disk with this one


@dataclass(frozen=True)
class Result:
    """The findings and measurements of a survey."""

    nodes: tuple[str, ...]
    machines: tuple[Finding, ...] = ()  # about single nodes
    between: tuple[Finding, ...] = ()  # about links and differences between nodes
    pairs: tuple[HostPair, ...] = ()
    collectives: tuple[Collective, ...] = field(default=())

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings."""
        return (*self.machines, *self.between)


def encode(result: Result) -> bytes:
    """Return the result as JSON."""
    return msgspec.json.encode(result)


def decode(text: bytes) -> Result:
    """Parse the result from JSON. Raises ValueError."""
    return msgspec.json.decode(text, type=Result)


def write(result: Result, path: str) -> None:
    """Write the file atomically."""
    folder = os.path.dirname(os.path.abspath(path))
    file, part = tempfile.mkstemp(prefix=".doctor-", dir=folder)
    try:
        with os.fdopen(file, "wb") as out:
            out.write(encode(result))
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise


def find(output: bytes) -> Result | None:
    """Return the last result in the output of a run. Lines may have prefixes."""
    for line in reversed(output.splitlines()):
        _, mark, text = line.partition(MARK.encode())
        if mark:
            try:
                return decode(text)
            except ValueError:
                continue
    return None
