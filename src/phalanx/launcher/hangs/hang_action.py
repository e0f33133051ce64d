"""Decides what --on-hang does about a stall. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx.diagnose.evidence import Evidence
from phalanx.diagnose.rank_state import LONGER
from phalanx.diagnose.verdict import Verdict

OnHang = Literal["report", "stop", "kill"]
_OF_THE_GROUP = ("network", "join")  # verdicts that name no rank if all wait together; new connections may help


@dataclass(frozen=True)
class WaitLonger:
    """The rank may only be slow: diagnose again after some seconds."""

    seconds: float


@dataclass(frozen=True)
class StopRun:
    """End the run with an error."""

    why: str
    fix: str


@dataclass(frozen=True)
class KillRanks:
    """Kill the live ranks that are to blame. There may be none."""

    ranks: frozenset[int]


@dataclass(frozen=True)
class FormAgain:
    """Ranks wait for each other, and no script is to blame: kill one, so that the group forms again, with new
    connections.
    """

    rank: int


def cut_off(on_hang: OnHang, verdicts: Sequence[Verdict]) -> Verdict | None:
    """Return the verdict about a node that others cannot reach, and whose ranks the run does not need to continue.

    This does not depend on --on-hang: killed ranks would be replaced on the same node. Only "stop" ends the run.
    """
    return None if on_hang == "stop" else next((each for each in verdicts if each.kind == "partition"), None)


def newcomer(evidence: Evidence, verdicts: Sequence[Verdict], on_trial: Collection[int]) -> Verdict | WaitLonger | None:
    """Return why a node that has joined a running group, and has not committed a step with it, is dismissed.

    The others were training without it, so they continue without it, whatever --on-hang says. A verdict that names
    only ranks of the others is used, too: they wait for the newcomer, or do not reach it.
    """
    if not on_trial:
        return None
    found = next((each for each in verdicts if not {*each.ranks}.isdisjoint(on_trial)), verdicts[0])
    if found.kind == "loop" and evidence.waited < LONGER * evidence.limit:
        return WaitLonger(LONGER * evidence.limit - evidence.waited)
    return found


Action = WaitLonger | StopRun | KillRanks | FormAgain


def choose(
    on_hang: OnHang, evidence: Evidence, verdicts: Sequence[Verdict], *, recovering: bool = False
) -> Action | None:
    """Return the action for a stall with these verdicts. None: it is only reported.

    `recovering`: the group has formed after a failure, and has not committed a step. That a failed recovery is tried
    again does not depend on --on-hang, unless the stall is to end the run.
    """
    living = {rank.rank for rank in evidence.ranks if rank.ended is None}
    blamed = next((found for verdict in verdicts if (found := living.intersection(verdict.ranks))), set[int]())
    together = bool(living) and not blamed and verdicts[0].kind in _OF_THE_GROUP
    if on_hang == "report":
        # Ranks may be named only because what others sent has not arrived.
        behind = living.intersection(verdicts[0].ranks) if verdicts[0].kind == "network" else set[int]()
        return FormAgain(max(behind or living)) if recovering and (behind or together) else None
    if verdicts[0].kind == "loop" and evidence.waited < LONGER * evidence.limit:
        return WaitLonger(LONGER * evidence.limit - evidence.waited)
    if on_hang == "kill" and (parted := cut_off(on_hang, verdicts)) is not None:
        fix = "repair the network, or start with -n MIN:MAX: the run then continues without one of them"
        return StopRun(f"the run is stalled and cannot continue: {parted.text}", fix)
    if on_hang == "stop":
        why = f"the run is stalled and was stopped (--on-hang stop): {verdicts[0].text}"
        return StopRun(why, verdicts[0].fix)
    return FormAgain(max(living)) if together else KillRanks(frozenset(blamed))
