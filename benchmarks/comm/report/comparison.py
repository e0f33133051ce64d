"""The comparison with an earlier run: one ratio per measurement, and whether it is more than noise."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from benchmarks.comm.results import Measurement
from phalanx.errors import OptionError

LEAST = 0.05  # smaller differences are noise: results vary from run to run


@dataclass(frozen=True)
class Change:
    """A measurement that both runs have."""

    measurement: Measurement
    before: float  # seconds
    ratio: float  # of the times, now to before
    noise: float  # error of the ratio

    @property
    def word(self) -> str:
        """`slower`, `faster`, or nothing where it is noise."""
        if self.ratio > 1 + self.noise:
            return "slower"
        return "faster" if self.ratio < 1 / (1 + self.noise) else ""


def compare(now: Sequence[Measurement], before: Sequence[Measurement]) -> list[Change]:
    """Compare the measurements that both runs have."""
    old = {(measurement.key, measurement.backend): measurement for measurement in before if measurement.rounds}
    found = []
    for measurement in now:
        earlier = old.get((measurement.key, measurement.backend))
        if earlier is None or not measurement.rounds:
            continue
        noise = max(LEAST, measurement.noise + earlier.noise)
        found.append(Change(measurement, earlier.seconds, measurement.seconds / earlier.seconds, noise))
    return found


def read(path: str) -> tuple[list[Measurement], dict[str, Any]]:
    """Read the JSON of an earlier run: its measurements, and its machine."""
    try:
        with open(path) as file:
            data = json.load(file)
        if not isinstance(data, dict) or data.get("benchmark") != "comm":
            raise ValueError('"benchmark" in it is not "comm"')
        return msgspec.convert(data["measurements"], type=list[Measurement], strict=False), dict(
            data.get("machine") or {}
        )
    except OSError as error:
        why = error.strerror or str(error)
    except (ValueError, KeyError, msgspec.MsgspecError) as error:
        why = f"not results of phalanx bench comm: {error}"
    raise OptionError(
        f"--compare {path} cannot be read: {why}",
        details=["expected a file that --json has written"],
        fix="phalanx bench comm --json a.json; later phalanx bench comm --compare a.json",
    )
