"""Decides what --on-hang does about a stall. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx.diagnose.evidence import Evidence
from phalanx.diagnose.rank_state import LONGER
from phalanx.diagnose.verdict import Verdict

OnHang = Literal["report", "stop", "kill"]


@dataclass(frozen=True)
class WaitLonger:
    """A rank may only be slow, or many ranks may take long to connect: diagnose again after some seconds."""

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
    between = bool(living) and all(map(_is_between, verdicts))
    if on_hang == "report" and not (recovering and between):
        return None
    connecting = between and on_hang != "stop" and any(verdict.kind == "join" for verdict in verdicts)
    if (connecting or verdicts[0].kind == "loop") and evidence.waited < LONGER * evidence.limit:
        return WaitLonger(LONGER * evidence.limit - evidence.waited)
    if on_hang == "kill" and (parted := cut_off(on_hang, verdicts)) is not None:
        fix = "repair the network, or start with -n MIN:MAX: the run then continues without one of them"
        return StopRun(f"the run is stalled and cannot continue: {parted.text}", fix)
    if on_hang == "stop":
        why = f"the run is stalled and was stopped (--on-hang stop): {verdicts[0].text}"
        return StopRun(why, verdicts[0].fix)
    if between:
        return FormAgain(_cheapest(evidence, verdicts))
    blamed = next((found for verdict in verdicts if (found := living.intersection(verdict.ranks))), set[int]())
    return KillRanks(frozenset(blamed))


def _is_between(verdict: Verdict) -> bool:
    """Return whether ranks only wait for each other or for data that does not arrive: new connections may help.

    A network verdict may name the ranks that receive nothing. Ranks that a join verdict names are missing.
    """
    return verdict.kind == "network" or (verdict.kind == "join" and not verdict.ranks)


def _cheapest(evidence: Evidence, verdicts: Sequence[Verdict]) -> int:
    """Return the rank to kill, if any will do: one that was just started, because others may have the only state.

    Of several, one that receives nothing, or the one with the highest number.
    """
    named = {rank for verdict in verdicts for rank in verdict.ranks}
    living = [rank for rank in evidence.ranks if rank.ended is None]
    return max(living, key=lambda each: (each.step < 0, each.rank in named, each.rank)).rank
