"""A rank that waits for its data: the line of the Dataset, or the DataLoader's workers and how they are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from phalanx.diagnose import frames, words
from phalanx.diagnose.evidence import Frame
from phalanx.diagnose.frames import Act
from phalanx.diagnose.rank_state import Field, RankState
from phalanx.diagnose.rules import gpu
from phalanx.diagnose.verdict import Verdict

_WORKER = "pt_data"
_ERROR = "DataLoader(timeout=60) makes it an error"
_LINE = f"py-spy dump --pid of that worker shows its line; {_ERROR}"
_DEAD = "the output of that rank says why it died, or dmesg if memory was short"
_STATES = {"Z": "dead", "X": "dead", "T": "stopped", "t": "held by a tracer", "D": "waiting for a disk or NFS"}


def verdict(field: Field, kept: Sequence[RankState]) -> Verdict | None:
    """Of ranks that are all at one place; those that wait for workers come alone."""
    standing, ranks = kept[0], tuple(each.number for each in kept)
    if standing.act.what == "loader":
        return _workers(field, standing)
    if not frames.in_data(standing.frames) and standing.rank.phase != "data":
        return None
    cause = standing.act.words or ("computing" if standing.spins else "")
    why = f" ({cause})" if cause else ""
    where = f", {words.place(standing.place)}" if standing.place is not None else ""
    return Verdict(
        kind="data",
        ranks=ranks,
        text=f"{words.who(ranks)} {words.verb(ranks, 'is', 'are')} in data loading{where}{why}{field.wait_for(ranks)}",
        details=_seen(standing),
        place=standing.place,
        certain=False,
    )


def _workers(field: Field, standing: RankState) -> Verdict:
    children = [child.split(maxsplit=2) for child in (standing.rank.process.children if standing.rank.process else ())]
    known = [child for child in children if len(child) == 3]
    named = [child for child in known if _WORKER in child[2]]
    workers = named or known
    if (busy := _inside(standing, {pid: state for pid, state, _ in workers})) is not None:
        return _in_worker(field, standing, *busy)
    bad = [(pid, _STATES[state]) for pid, state, _ in workers if state in _STATES]
    dead = [pid for pid, how in bad if how == "dead"]
    if bad:
        pid, how = (dead[0], "dead") if dead else bad[0]
        cause = f"waiting for a DataLoader worker that is {how}: process {pid}"
    elif any(state == "R" for _, state, _ in workers):
        cause = "waiting for its DataLoader workers, which compute"
    else:
        cause = "waiting for its DataLoader workers"
    node = next((node for node in field.evidence.nodes if node.node == standing.rank.node), None)
    killed = (node.out_of_memory,) if dead and node is not None and node.out_of_memory else ()
    return Verdict(
        kind="data",
        ranks=(standing.number,),
        text=f"rank {standing.number} is in data loading{words.at(standing.place)} ({cause})"
        f"{field.wait_for([standing.number])}",
        details=(
            *(f"worker {pid}: state {state}, {command}" for pid, state, command in workers[:8]),
            *killed,
            *idle_gpu(standing),
        ),
        place=standing.place,
        fix=_DEAD if dead else _LINE if workers else _ERROR,
        certain=bool(dead),
    )


def _inside(standing: RankState, workers: dict[str, str]) -> tuple[str, Act, Frame] | None:
    """A worker that is at a line of the user's: who waits for the next index is not what keeps us. A fork has the
    frames of its parent below its own."""
    for thread in standing.rank.threads:
        pid = thread.name.split()[1] if thread.name.startswith("process ") else ""
        if workers.get(pid, "Z") not in _STATES:
            own = tuple(takewhile(lambda frame: frame.function != "_worker_loop", thread.frames))
            place = frames.own(own)
            if place is not None:
                return pid, frames.act(own), place
    return None


def _in_worker(field: Field, standing: RankState, pid: str, act: Act, place: Frame) -> Verdict:
    doing = f"{act.words}, in" if act.words else "in"
    return Verdict(
        kind="data",
        ranks=(standing.number,),
        text=f"rank {standing.number} is in data loading, {words.place(place)} ({doing} a DataLoader worker, process "
        f"{pid}){field.wait_for([standing.number])}",
        details=(*((f"its line: {place.source}",) if place.source else ()), *idle_gpu(standing)),
        place=place,
        fix=_ERROR,
        certain=False,
    )


def _seen(standing: RankState) -> tuple[str, ...]:
    source = standing.place.source if standing.place is not None else ""
    return (*((f"its line: {source}",) if source else ()), *idle_gpu(standing))


def idle_gpu(standing: RankState) -> tuple[str, ...]:
    """The GPU has nothing to do: it is the CPU that keeps the rank."""
    card = standing.rank.gpu
    return (f"its GPU is idle{gpu.use(card)}",) if gpu.idle(card) else ()
