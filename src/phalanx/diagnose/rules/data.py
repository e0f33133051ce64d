"""Ranks that wait for data: the line of their Dataset, or the state of their DataLoader workers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from phalanx.diagnose import frames, words
from phalanx.diagnose.evidence import Frame
from phalanx.diagnose.frames import Act
from phalanx.diagnose.rank_state import RankState
from phalanx.diagnose.rules import gpu
from phalanx.diagnose.verdict import Verdict
from phalanx.diagnose.waits import WaitGraph

_WORKER = "pt_data"
_ERROR = "DataLoader(timeout=60) makes it an error"
_LINE = f"py-spy dump --pid of that worker shows its line; {_ERROR}"
_DEAD = "the output of that rank says why it died, or dmesg if memory was short"
_STATES = {"Z": "dead", "X": "dead", "T": "stopped", "t": "held by a tracer", "D": "waiting for a disk or NFS"}


def verdict(graph: WaitGraph, kept: Sequence[RankState]) -> Verdict | None:
    """Return a verdict for ranks at the same place. A rank that waits for DataLoader workers gets its own verdict."""
    state, ranks = kept[0], tuple(each.number for each in kept)
    if state.act.what == "loader":
        return _workers(graph, state)
    if not frames.in_data(state.frames) and state.rank.phase != "data":
        return None
    cause = state.act.words or ("computing" if state.spins else "")
    why = f" ({cause})" if cause else ""
    where = f", {words.place(state.place)}" if state.place is not None else ""
    return Verdict(
        kind="data",
        ranks=ranks,
        text=f"{words.who(ranks)} {words.verb(ranks, 'is', 'are')} in data loading{where}{why}{graph.wait_for(ranks)}",
        details=_seen(state),
        place=state.place,
        certain=False,
    )


def _workers(graph: WaitGraph, state: RankState) -> Verdict:
    children = [child.split(maxsplit=2) for child in (state.rank.process.children if state.rank.process else ())]
    known = [child for child in children if len(child) == 3]
    named = [child for child in known if _WORKER in child[2]]
    workers = named or known
    if (busy := _inside(state, {pid: process_state for pid, process_state, _ in workers})) is not None:
        return _in_worker(graph, state, *busy)
    bad = [(pid, _STATES[process_state]) for pid, process_state, _ in workers if process_state in _STATES]
    dead = [pid for pid, how in bad if how == "dead"]
    if bad:
        pid, how = (dead[0], "dead") if dead else bad[0]
        cause = f"waiting for a DataLoader worker that is {how}: process {pid}"
    elif any(process_state == "R" for _, process_state, _ in workers):
        cause = "waiting for its DataLoader workers, which compute"
    else:
        cause = "waiting for its DataLoader workers"
    node = next((node for node in graph.evidence.nodes if node.node == state.rank.node), None)
    killed = (node.out_of_memory,) if dead and node is not None and node.out_of_memory else ()
    return Verdict(
        kind="data",
        ranks=(state.number,),
        text=f"rank {state.number} is in data loading{words.at(state.place)} ({cause}){graph.wait_for([state.number])}",
        details=(
            *(f"worker {pid}: state {process_state}, {command}" for pid, process_state, command in workers[:8]),
            *killed,
            *idle_gpu(state),
        ),
        place=state.place,
        fix=_DEAD if dead else _LINE if workers else _ERROR,
        certain=bool(dead),
    )


def _inside(state: RankState, workers: dict[str, str]) -> tuple[str, Act, Frame] | None:
    """Return a DataLoader worker that is in user code. Below its own frames, a fork has those of its parent."""
    for thread in state.rank.threads:
        pid = thread.name.split()[1] if thread.name.startswith("process ") else ""
        if workers.get(pid, "Z") not in _STATES:
            own = tuple(takewhile(lambda frame: frame.function != "_worker_loop", thread.frames))
            place = frames.own(own)
            if place is not None:
                return pid, frames.act(own), place
    return None


def _in_worker(graph: WaitGraph, state: RankState, pid: str, act: Act, place: Frame) -> Verdict:
    doing = f"{act.words}, in" if act.words else "in"
    return Verdict(
        kind="data",
        ranks=(state.number,),
        text=f"rank {state.number} is in data loading, {words.place(place)} ({doing} a DataLoader worker, process "
        f"{pid}){graph.wait_for([state.number])}",
        details=(*((f"its line: {place.source}",) if place.source else ()), *idle_gpu(state)),
        place=place,
        fix=_ERROR,
        certain=False,
    )


def _seen(state: RankState) -> tuple[str, ...]:
    source = state.place.source if state.place is not None else ""
    return (*((f"its line: {source}",) if source else ()), *idle_gpu(state))


def idle_gpu(state: RankState) -> tuple[str, ...]:
    """Return a line if the GPU is idle, which means that the CPU is the bottleneck."""
    card = state.rank.gpu
    return (f"its GPU is idle{gpu.use(card)}",) if gpu.idle(card) else ()
