"""Facts about a process from kernel, driver and other nodes: stopped, swapped out, silent, gone."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.diagnose import frames, words
from phalanx.diagnose.evidence import Evidence, NodeFacts
from phalanx.diagnose.rank_state import LONGER, SPINS, RankState, only_late
from phalanx.diagnose.verdict import Verdict
from phalanx.diagnose.waits import WaitGraph

_SILENT_AFTER = 5.0  # seconds without a message from a node, which sends one per second
_UNRESPONSIVE_AFTER = 1.5  # likewise, if the node has not answered a request for evidence either
_SWAPPED = 64e6  # minimum bytes of a process in swap
_FAULTS = 50.0  # pages read back per second
_RELEASE = "native code has to release Python's lock (Py_BEGIN_ALLOW_THREADS) around what takes long"
_FULL = 0.03  # share of available memory below which a node counts as full


def lost_nodes(evidence: Evidence) -> list[NodeFacts]:
    """Return the nodes that are lost or do not answer."""
    seen = {
        rank.node for rank in evidence.ranks if rank.threads or rank.process or rank.calls or rank.ended is not None
    }
    return [
        node
        for node in evidence.nodes
        if node.lost or node.silent >= _SILENT_AFTER or (node.silent >= _UNRESPONSIVE_AFTER and node.node not in seen)
    ]


def nodes(graph: WaitGraph) -> Iterator[Verdict]:
    """Yield a verdict for each lost node."""
    for node in lost_nodes(graph.evidence):
        ranks = tuple(sorted(rank.rank for rank in graph.evidence.ranks if rank.node == node.node))
        seen = "its connection has ended" if node.lost else f"no message from it for {words.duration(node.silent)}"
        cause = (
            node.finding or graph.evidence.finding or ("the node is lost" if node.lost else "link down, or it hangs")
        )
        name = node.host or str(node.node)
        yield Verdict(
            kind="node",
            ranks=ranks,
            text=f"node {name}{f' ({words.who(ranks)})' if ranks else ''} does not answer: {cause}",
            details=(seen,),
            fix="phalanx doctor checks the network to it",
            certain=node.lost or node.silent >= _SILENT_AFTER,
        )


def verdicts(graph: WaitGraph) -> Iterator[Verdict]:
    """Yield a verdict for each rank whose process explains the stall."""
    away = {node.node for node in lost_nodes(graph.evidence)}
    for state in graph.of(graph.states):
        if state.rank.node in away:
            continue
        found = (
            _exit(graph, state)
            or _stopped(graph, state)
            or _gpu(graph, state)
            or _memory(graph, state)
            or _lock(graph, state)
        )
        if found is not None:
            yield found


def _exit(graph: WaitGraph, state: RankState) -> Verdict | None:
    ended = state.rank.ended
    if not state.gone or ended == 0 or not graph.waiting_for([state.number]):
        return None
    node = next((node for node in graph.evidence.nodes if node.node == state.rank.node), None)
    how = words.exit_text(ended) if ended is not None else "has ended, but its parent has not reaped it (zombie)"
    return Verdict(
        kind="exited",
        ranks=(state.number,),
        text=f"rank {state.number} {how}{graph.wait_for([state.number])}",
        details=(node.out_of_memory,) if node is not None and node.out_of_memory and ended == -9 else (),
        place=state.place,
        fix="the error of that rank is the cause: see its output",
    )


def _stopped(graph: WaitGraph, state: RankState) -> Verdict | None:
    process = state.rank.process
    if not state.stopped or process is None:
        return None
    traced = process.state == "t"
    how = "is held by a tracer (strace, gdb)" if traced else "is stopped (SIGSTOP)"
    return Verdict(
        kind="traced" if traced else "stopped",
        ranks=(state.number,),
        text=f"rank {state.number} {how}{words.at(state.place)}{graph.wait_for([state.number])}",
        details=(f"process {process.pid} is in state {process.state}",),
        place=state.place,
        fix="let the tracer continue or end it" if traced else f"kill -CONT {process.pid}",
    )


def _gpu(graph: WaitGraph, state: RankState) -> Verdict | None:
    gpu = state.rank.gpu
    if gpu is None or not gpu.lost or state.gone:
        return None
    node = words.host(graph.evidence, state.rank.node)
    return Verdict(
        kind="gpu lost",
        ranks=(state.number,),
        text=f"rank {state.number} has lost its GPU: GPU {gpu.index} of node {node} does not answer its driver"
        f"{graph.wait_for([state.number])}",
        place=state.place,
        fix="dmesg | grep -i xid shows why; the node needs a reset of that GPU",
    )


def _memory(graph: WaitGraph, state: RankState) -> Verdict | None:
    process = state.rank.process
    if process is None or state.gone or not state.stuck or state.rank.busy or process.major_faults < _FAULTS:
        return None
    node = next((node for node in graph.evidence.nodes if node.node == state.rank.node), None)
    full = node is not None and node.memory > 0 and node.available < _FULL * node.memory
    if process.swapped < _SWAPPED and not full:
        return None
    details = [f"{process.major_faults:.0f} pages are read back from disk each second"]
    if node is not None and node.memory:
        details.append(f"node {node.host}: {words.quantity(node.available)} of {words.quantity(node.memory)} are left")
    return Verdict(
        kind="memory",
        ranks=(state.number,),
        text=f"rank {state.number} is out of memory and swapping ({words.quantity(process.swapped)} on disk)"
        f"{words.at(state.place)}{graph.wait_for([state.number])}",
        details=tuple(details),
        place=state.place,
        fix="fewer DataLoader workers, a smaller batch, or fewer ranks on that node",
    )


def _lock(graph: WaitGraph, state: RankState) -> Verdict | None:
    process = state.rank.process
    if not state.held or process is None or process.state == "D" or state.call is not None:
        return None
    if only_late(graph.evidence, state):
        return None
    if state.long and state.rank.silent < LONGER * graph.evidence.limit:
        return None  # native code of a compiler or an import
    holder = next((thread for thread in state.rank.threads if thread.holds_gil), None)
    place = (frames.own(holder.frames) if holder is not None else None) or state.place
    thread = f" in thread {holder.name.removeprefix('thread ')}" if holder is not None and not holder.main else ""
    if holder is None and len(state.rank.threads) > 2 and frames.asleep(process).what == "lock":
        return _other_thread(graph, state)
    if process.state == "R" or process.cpu >= SPINS:
        how = "spins holding the GIL"
    elif holder is not None and not holder.main:  # the kernel state is that of the main thread
        how = "holds the GIL"
    else:
        doing = frames.asleep(process)
        how = f"holds the GIL while {doing.words}" if doing.words else "holds the GIL and does nothing"
    return Verdict(
        kind="gil",
        ranks=(state.number,),
        text=f"rank {state.number} {how}{words.at(place)}{thread}{graph.wait_for([state.number])}",
        details=(f"no Python of this process has run for {words.duration(state.rank.silent)}",),
        place=place,
        fix=_RELEASE,
        certain=state.rank.silent >= graph.evidence.limit,
    )


def _other_thread(graph: WaitGraph, state: RankState) -> Verdict:
    """Return a verdict: the main thread waits for a lock that another, unknown thread holds."""
    others = [thread for thread in state.rank.threads if not thread.main and thread.frames]
    places = ((thread.name, frames.own(thread.frames) or thread.frames[0]) for thread in others)
    return Verdict(
        kind="gil",
        ranks=(state.number,),
        text=f"a thread of rank {state.number} holds the GIL, and its main thread waits for it"
        f"{words.at(state.place)}{graph.wait_for([state.number])}",
        details=tuple(f"{name}{words.at(place)}" for name, place in places)[:8],
        place=state.place,
        fix=_RELEASE,
        certain=state.rank.silent >= graph.evidence.limit,
    )
