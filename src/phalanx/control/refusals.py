"""Advice about a node that the leader rejected: printed on that node, and by node 0 if it times out waiting for it."""

from __future__ import annotations

from dataclasses import dataclass

FIXES = {
    "run": "give the same --rdzv-id on every node, or another --master-port to one of the runs",
    "plan": "type the same command on every node, and keep the same script there",
    "version": "install the same versions on every node",
    "taken": "give every node its own --node-rank; if the other is left from before, end it: phalanx stop",
    "devices": (
        "the same -g on every node, with the number of workers of each: -g 8,2; phalanx plan shows what is here"
    ),
}


@dataclass(frozen=True)
class Rejection:
    """Why a caller was rejected, and what to do about it. Empty: the reason says it."""

    why: str
    fix: str = ""
