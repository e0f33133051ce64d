"""Looks of the probe at a rank, in the form of its status slot."""

from __future__ import annotations

from phalanx.forkserver.board.status_slot import PHASES, SlotLook

WALL = 1000.0  # seconds that the wall clock is ahead of the other


def look(tenths: float, phase: str, step: int = 0) -> SlotLook:
    return SlotLook((tenths + 0.05) / 10, PHASES.index(phase), step)
