"""What the kernel, the driver and the other nodes prove about a process: stopped, swapped out, silent, gone."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.diagnose import desync, frames, words
from phalanx.diagnose.evidence import Evidence, Node
from phalanx.diagnose.standing import LONGER, SPINS, Field, Standing, described
from phalanx.diagnose.verdict import Verdict

_UNHEARD = 5.0  # seconds without a word of a node, which says one every second
_SWAPPED = 64e6  # bytes of a process on disk, at least
_FAULTS = 50.0  # pages read back in a second
_FULL = 0.03  # of a node's memory is left: it has none


def lost_nodes(evidence: Evidence) -> list[Node]:
    return [node for node in evidence.nodes if node.lost or node.silent >= _UNHEARD]


def nodes(field: Field) -> Iterator[Verdict]:
    for node in lost_nodes(field.evidence):
        ranks = tuple(sorted(rank.rank for rank in field.evidence.ranks if rank.node == node.node))
        seen = "its connection has ended" if node.lost else f"nothing heard of it for {words.duration(node.silent)}"
        cause = node.finding or field.evidence.finding or ("the node is lost" if node.lost else "link down")
        name = node.host or str(node.node)
        yield Verdict(
            kind="node",
            ranks=ranks,
            text=f"node {name}{f' ({words.who(ranks)})' if ranks else ''} does not answer: {cause}",
            details=(seen,),
            fix="phalanx doctor shows the way to it",
        )


def verdicts(field: Field) -> Iterator[Verdict]:
    away = {node.node for node in lost_nodes(field.evidence)}
    for standing in field.of(field.standings):
        if standing.rank.node in away:
            continue
        found = (
            _exit(field, standing)
            or _stopped(field, standing)
            or _gpu(field, standing)
            or _memory(field, standing)
            or _lock(field, standing)
        )
        if found is not None:
            yield found


def wait_for(field: Field, standing: Standing) -> str:
    """; the other 3 wait for it in all_reduce #214 (DDP bucket 1, 6.5 MB)"""
    ranks = field.waiting_for([standing.number])
    if not ranks:
        return ""
    waiting = field.of(ranks)
    first = next((each for each in waiting if each.call is not None), waiting[0])
    waits = words.verb(ranks, "waits", "wait")
    return f"; {words.others(ranks, field.evidence, [standing.number])} {waits} for it in {described(first)}"


def _exit(field: Field, standing: Standing) -> Verdict | None:
    ended = standing.rank.ended
    if not standing.gone or not field.waiting_for([standing.number]):
        return None
    if ended == 0:
        return left(field, standing)
    node = next((node for node in field.evidence.nodes if node.node == standing.rank.node), None)
    how = words.exit_text(ended) if ended is not None else "has ended, and nobody has taken notice (zombie)"
    return Verdict(
        kind="exited",
        ranks=(standing.number,),
        text=f"rank {standing.number} {how}{wait_for(field, standing)}",
        details=(node.out_of_memory,) if node is not None and node.out_of_memory and ended == -9 else (),
        place=standing.place,
        fix="the error of that rank is the cause: see its output",
    )


def left(field: Field, standing: Standing) -> Verdict | None:
    """It has ended well or is about to, while others still wait for it."""
    waiting = field.of(field.waiting_for([standing.number]))
    first = next((each for each in waiting if each.call is not None), None)
    if first is None or first.call is None or first.call.op in ("send", "recv"):
        return None
    number = standing.number
    them = words.others([each.number for each in waiting], field.evidence, [number])
    guard = desync.guard(first, first.call)
    if guard is not None:
        return Verdict(
            kind="skipped collective",
            ranks=(number,),
            text=f"rank {number} skipped a collective that {them} called{words.inside(guard)}: "
            f"{words.numbered(first.call)}; rank {number} {_whither(standing)}",
            place=guard,
            fix="all ranks of a group have to call the same collectives in the same order",
        )
    counted = [each for each in [standing, *waiting] if each.rank.step >= 0][:8]
    steps = ""
    if standing.rank.step >= 0 and first.rank.step >= 0:
        steps = f" after {standing.rank.step} steps" if standing.rank.step != first.rank.step else ""
    return Verdict(
        kind="uneven data",
        ranks=(number,),
        text=f"rank {number} left the loop earlier than the others{steps} and {_whither(standing)}, while {them} still "
        f"{words.verb([each.number for each in waiting], 'waits', 'wait')} in {described(first)}: uneven data",
        place=standing.place,
        details=tuple(f"rank {each.number}: {each.rank.step} steps" for each in counted),
        fix=desync.UNEVEN,
    )


def _whither(standing: Standing) -> str:
    if standing.rank.ended is not None:
        return words.exit_text(standing.rank.ended)
    if standing.act.name == "destroy_process_group":
        return f"is in destroy_process_group{words.at(standing.place)}"
    return "is at its end"


def _stopped(field: Field, standing: Standing) -> Verdict | None:
    process = standing.rank.process
    if not standing.stopped or process is None:
        return None
    traced = process.state == "t"
    how = "is held by a tracer (strace, gdb)" if traced else "is stopped (SIGSTOP)"
    return Verdict(
        kind="traced" if traced else "stopped",
        ranks=(standing.number,),
        text=f"rank {standing.number} {how}{words.at(standing.place)}{wait_for(field, standing)}",
        details=(f"process {process.pid} is in state {process.state}",),
        place=standing.place,
        fix="let the tracer go on or end it" if traced else f"kill -CONT {process.pid}",
    )


def _gpu(field: Field, standing: Standing) -> Verdict | None:
    gpu = standing.rank.gpu
    if gpu is None or not gpu.lost or standing.gone:
        return None
    return Verdict(
        kind="gpu lost",
        ranks=(standing.number,),
        text=f"the GPU of rank {standing.number} is gone: GPU {gpu.index} of node "
        f"{words.host(field.evidence, standing.rank.node)} does not answer its driver{wait_for(field, standing)}",
        place=standing.place,
        fix="dmesg | grep -i xid shows why; the node needs a reset of that GPU",
    )


def _memory(field: Field, standing: Standing) -> Verdict | None:
    process = standing.rank.process
    if process is None or standing.gone or not standing.stuck or standing.rank.busy:
        return None
    node = next((node for node in field.evidence.nodes if node.node == standing.rank.node), None)
    full = node is not None and node.memory > 0 and node.available < _FULL * node.memory
    thrashes = process.swapped >= _SWAPPED and process.major_faults >= _FAULTS
    if not thrashes and not (full and process.major_faults >= _FAULTS):
        return None
    details = [f"{process.major_faults:.0f} pages are read back from disk each second"]
    if node is not None and node.memory:
        details.append(f"node {node.host}: {words.quantity(node.available)} of {words.quantity(node.memory)} are left")
    return Verdict(
        kind="memory",
        ranks=(standing.number,),
        text=f"rank {standing.number} is out of memory and swapping ({words.quantity(process.swapped)} on disk)"
        f"{words.at(standing.place)}{wait_for(field, standing)}",
        details=tuple(details),
        place=standing.place,
        fix="fewer DataLoader workers, a smaller batch, or fewer ranks on that node",
    )


def _lock(field: Field, standing: Standing) -> Verdict | None:
    process = standing.rank.process
    if not standing.held or process is None or process.state == "D" or standing.call is not None:
        return None
    if standing.long and standing.rank.silent < LONGER * field.evidence.limit:
        return None  # native code of a compiler, or of an import
    holder = next((thread for thread in standing.rank.threads if thread.holds_gil), None)
    place = (frames.own(holder.frames) if holder is not None else None) or standing.place
    thread = f" in thread {holder.name}" if holder is not None and not holder.main else ""
    if process.state == "R" or process.cpu >= SPINS:
        how = "spins holding the GIL"
    else:
        doing = frames.asleep(process)
        how = f"holds the GIL while {doing.words}" if doing.words else "holds the GIL and does nothing"
    return Verdict(
        kind="gil",
        ranks=(standing.number,),
        text=f"rank {standing.number} {how}{words.at(place)}{thread}{wait_for(field, standing)}",
        details=(f"no Python of this process has run for {words.duration(standing.rank.silent)}",),
        place=place,
        fix="native code has to release Python's lock (Py_BEGIN_ALLOW_THREADS) around what takes long",
        certain=standing.rank.silent >= field.evidence.limit,
    )
