"""This run beside an earlier one: a ratio for each cell, and whether it is more than noise."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from phalanx.bench.comm.cells import Cell
from phalanx.errors import OptionError

LEAST = 0.05  # below this a difference is none: machines are not the same from one run to the next


@dataclass(frozen=True)
class Change:
    cell: Cell
    before: float  # seconds
    ratio: float  # of the time, now by before
    noise: float  # what that may be off by

    @property
    def word(self) -> str:
        if self.ratio > 1 + self.noise:
            return "slower"
        return "faster" if self.ratio < 1 / (1 + self.noise) else ""


def compare(now: Sequence[Cell], before: Sequence[Cell]) -> list[Change]:
    """Cells that are in both."""
    old = {(cell.key, cell.backend): cell for cell in before if cell.rounds}
    found = []
    for cell in now:
        earlier = old.get((cell.key, cell.backend))
        if earlier is None or not cell.rounds:
            continue
        noise = max(LEAST, cell.noise + earlier.noise)
        found.append(Change(cell, earlier.seconds, cell.seconds / earlier.seconds, noise))
    return found


def read(path: str) -> tuple[list[Cell], dict[str, Any]]:
    """The cells of an earlier run's JSON, and the machine that it was on."""
    try:
        with open(path) as file:
            data = json.load(file)
        if not isinstance(data, dict) or data.get("benchmark") != "comm":
            raise ValueError('"benchmark" in it is not "comm"')
        return msgspec.convert(data["cells"], type=list[Cell], strict=False), dict(data.get("machine") or {})
    except OSError as error:
        why = error.strerror or str(error)
    except (ValueError, KeyError, msgspec.MsgspecError) as error:
        why = f"no results of phalanx bench comm: {error}"
    raise OptionError(
        f"--compare {path} cannot be read: {why}",
        details=["expected the file of an earlier run with --json"],
        fix="phalanx bench comm --json a.json; later phalanx bench comm --compare a.json",
    )
