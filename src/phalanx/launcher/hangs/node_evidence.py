"""Evidence of this node about a stalled run: reports of its ranks, the kernel and the GPU driver.

All ranks are queried at once. A rank that does not answer holds the GIL, is stopped, or was not forked by phalanx: its
stacks are obtained with a signal or py-spy. Every step has a time limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from phalanx.contract import encoding
from phalanx.diagnose import frames
from phalanx.diagnose.evidence import CallEvidence, Frame, NodeFacts, Process, Rank, ThreadStack
from phalanx.diagnose.rules.collectives.timeouts import Timeout
from phalanx.forkserver import linux
from phalanx.forkserver.probe import probe
from phalanx.launcher.evidence import evidence_reply, stacks
from phalanx.launcher.evidence.evidence_reply import EvidenceReply
from phalanx.launcher.evidence.source_lines import Sources
from phalanx.launcher.runs import root_cause
from phalanx.launcher.telemetry import gpus, process_stats

if TYPE_CHECKING:
    from phalanx.launcher.telemetry.process_stats import ProcessStatsReader
    from phalanx.launcher.workers.probes import ProbeClient
    from phalanx.launcher.workers.worker import Worker
    from phalanx.launcher.workers.worker_group import WorkerGroup

ANSWER = 1.2  # seconds for a rank to answer: on a busy host it may have to wait for a core
_SILENT = 1.0  # seconds: a rank whose probe published nothing for this long gets less time
_SILENT_ANSWER = 0.3
_STACKS = 0.7  # seconds to write stacks on a signal
_WAKE_INTERVAL = 0.05  # seconds over which wake-ups of the main thread are counted
_WAKES = 4  # in that time: it waits for the GIL
_CHILD = 0.15  # seconds for a child process to write its stacks
_SPY = 1.2  # seconds for py-spy
_DRIVER = 1.2  # seconds for the GPU driver, which may hang when a GPU is lost
LONGEST = ANSWER + _STACKS + _SPY + 1.0
_MOST_CHILDREN = 8  # per rank whose stacks are taken
_STOPPED = ("T", "t", "Z", "X")


class NodeEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What one node knows about itself and its ranks."""

    node: NodeFacts
    ranks: tuple[Rank, ...]


_decoder: encoding.Decoder[NodeEvidence] = encoding.Decoder(NodeEvidence)


def encode(evidence: NodeEvidence) -> bytes:
    """Encode the evidence of a node as JSON."""
    return encoding.encode(evidence)


def decode(text: bytes) -> NodeEvidence:
    """Decode the result of `encode`."""
    return _decoder.decode(text)


def without_listing_all(evidence: NodeEvidence, world_size: int) -> NodeEvidence:
    """Leave the rank list of groups with all ranks empty: otherwise the data grows with the square of the number of
    ranks.
    """
    whole = tuple(range(world_size))

    def short(rank: Rank) -> Rank:
        if all(group.ranks != whole for group in rank.groups):
            return rank
        return replace(
            rank, groups=tuple(replace(group, ranks=()) if group.ranks == whole else group for group in rank.groups)
        )

    return replace(evidence, ranks=tuple(map(short, evidence.ranks)))


async def take(attempt: WorkerGroup, stats: ProcessStatsReader, node: NodeFacts) -> NodeEvidence:
    """Gather the evidence of all ranks of this node, dead ones included."""
    workers = {name: worker for name, worker in attempt.workers.items() if not worker.spare}
    pids = [worker.pid for worker in workers.values() if worker.code is None and worker.pid]
    families = await asyncio.to_thread(linux.families, pids)
    cards, ranks = await asyncio.gather(
        gpus.query([worker.seat.slot.device for worker in workers.values()], _DRIVER, health=True),
        asyncio.gather(*(_rank(attempt, name, worker, stats, families) for name, worker in workers.items())),
    )
    found = [replace(rank, node=node.node, gpu=card) for rank, card in zip(ranks, cards, strict=True)]
    return NodeEvidence(node=node, ranks=await asyncio.to_thread(_annotated, found))


async def rank(attempt: WorkerGroup, name: str, worker: Worker, stats: ProcessStatsReader) -> Rank:
    """Gather the evidence of one rank."""
    families = await asyncio.to_thread(linux.families, [worker.pid])
    return await _rank(attempt, name, worker, stats, families)


def _annotated(ranks: list[Rank]) -> tuple[Rank, ...]:
    return tuple(map(Sources().annotated, ranks))


async def _rank(
    attempt: WorkerGroup, name: str, worker: Worker, stats: ProcessStatsReader, families: dict[int, list[int]]
) -> Rank:
    number = worker.seat.rank
    bare = Rank(
        rank=number, node=0, device=str(worker.seat.slot.device or ""), debugged=number in attempt.workers.debugged
    )
    if (ended := _ended(bare, attempt, worker)) is not None:
        return ended
    if not worker.pid:
        return replace(bare, note="it has not been started yet")
    now = stats.read(worker.pid)
    reply, why = await _ask(worker, now.state)
    process = await asyncio.to_thread(process_stats.describe, worker.pid, now, families.get(worker.pid, []))
    threads, note = stacks.clean(reply.threads), why
    if not any(thread.frames for thread in threads):
        threads, note = await _stacks(attempt, name, worker, now.state, why)
    threads += await _of_children(worker, process)
    if (ended := _ended(bare, attempt, worker)) is not None:  # meanwhile
        return replace(ended, process=process)
    status = worker.probe.status if worker.probe is not None else None
    # A process that is ending has no probe any more: then silence means nothing.
    looked = status.looked if status is not None and not status.text.get("ending") else 0.0
    return replace(
        bare,
        threads=threads,
        groups=reply.groups,
        calls=reply.calls,
        history=reply.history,
        store=reply.store,
        given=reply.given,
        hosts=reply.hosts,
        process=process,
        silent=round(time.monotonic() - looked, 1) if looked and not reply.threads else 0.0,
        note=note,
    )


def _ended(bare: Rank, attempt: WorkerGroup, worker: Worker) -> Rank | None:
    """Return the evidence of a rank that has ended, or is ending because it timed out. None: it runs."""
    if worker.code or worker.exit.expected:
        death = attempt.failures.process_failure(worker)
        if root_cause.gave_up(death):
            return _gave_up(bare, worker, death)
    return replace(bare, ended=worker.code) if worker.code is not None else None


def _gave_up(bare: Rank, worker: Worker, death: root_cause.ProcessFailure) -> Rank:
    """Return where the rank was waiting for others when it timed out, as if it still did."""
    reply = EvidenceReply()
    with contextlib.suppress(msgspec.ValidationError, TypeError, ValueError, KeyError):
        reply = evidence_reply.read(worker.exit.raised) if worker.exit.raised is not None else reply
    threads = stacks.clean(reply.threads)
    if not any(thread.frames for thread in threads):  # it reported none, so use its traceback
        lines = reversed(root_cause.report_of(death).stack)
        frames = tuple(Frame(file, number, function) for file, number, function, _ in lines)
        threads = (ThreadStack(name="MainThread", frames=frames, main=True),)
    timeout = root_cause.timeout(death) or Timeout()
    calls = _undone(reply.calls, {frame.function for thread in threads if thread.main for frame in thread.frames})
    if timeout.seq:  # NCCL's watchdog names the call, and ends the process without an exception
        calls = (*calls, CallEvidence(group=timeout.group, seq=timeout.seq, op=timeout.op))
    found = replace(bare, threads=threads, groups=reply.groups, calls=calls, history=reply.history)
    return replace(found, store=reply.store, given=reply.given, hosts=reply.hosts)


def _undone(calls: tuple[CallEvidence, ...], functions: set[str]) -> tuple[CallEvidence, ...]:
    """Mark the last call as not done if the rank failed in it: torch records it as completed."""
    last = calls[-1:]
    if last and last[0].done and (last[0].op in functions or "_engine_run_backward" in functions):
        return (*calls[:-1], replace(last[0], done=False))
    return calls


async def _ask(worker: Worker, state: str) -> tuple[EvidenceReply, str]:
    if worker.probe is None:
        return EvidenceReply(), "it has no probe"
    if state in _STOPPED:
        return EvidenceReply(), "it is stopped" if state in "Tt" else "it is dead"
    looked = worker.probe.status.looked
    limit = _SILENT_ANSWER if looked and time.monotonic() - looked > _SILENT else ANSWER
    answer = await worker.probe.ask("report", timeout=limit)
    if answer is None:
        return EvidenceReply(), f"it has not answered for {limit} s"
    try:
        return evidence_reply.read(answer), str(answer.get("why", ""))
    except (msgspec.ValidationError, TypeError, ValueError, KeyError) as error:
        return EvidenceReply(), f"its answer cannot be read: {error}"


async def _stacks(
    attempt: WorkerGroup, name: str, worker: Worker, state: str, why: str
) -> tuple[tuple[ThreadStack, ...], str]:
    """Get stacks from faulthandler, else from py-spy, when the probe does not answer because it lacks the GIL."""
    if worker.probe is not None and state not in _STOPPED and _stacks_by_signal(worker.probe, worker.pid):
        sent = lambda: attempt.workers.send_signal(name, probe.SIGNAL, alone=True)  # noqa: E731
        threads = stacks.parsed(await stacks.written(worker.probe.stacks, sent, _STACKS))
        looked = worker.probe.status.looked
        if threads and looked and time.monotonic() - looked > _SILENT:
            threads = await _with_holder(worker.pid, threads)
        if any(thread.frames for thread in threads):
            return threads, why
    threads, trouble = await stacks.spied(worker.pid, native=state not in _STOPPED, limit=_SPY)
    return threads, "; ".join(filter(None, (why, trouble)))


def _stacks_by_signal(shown: ProbeClient, pid: int) -> bool:
    """Return whether the process writes its stacks on a signal: it has our handler and the file is open."""
    if not linux.handles(pid, probe.SIGNAL) or shown.status.text.get("signal_taken"):
        return False
    with contextlib.suppress(OSError):
        ours = os.readlink(f"/proc/self/fd/{shown.stacks}")
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{fd}") == ours:
                    return True
    return False


async def _with_holder(pid: int, threads: tuple[ThreadStack, ...]) -> tuple[ThreadStack, ...]:
    """Mark the thread that holds the GIL.

    That is the main thread, unless it wakes every 5 ms because it waits for the GIL itself.
    """
    before = process_stats.switches(pid)
    await asyncio.sleep(_WAKE_INTERVAL)
    return holder(threads, waits=process_stats.switches(pid) - before >= _WAKES)


def holder(threads: tuple[ThreadStack, ...], *, waits: bool) -> tuple[ThreadStack, ...]:
    """Mark the holder of the GIL if only one thread can be it. `waits`: the main thread waits for it."""
    candidates = [each for each in threads if each.main is not waits and (each.main or _at_work(each))]
    return tuple(replace(each, holds_gil=[each] == candidates) for each in threads)


def _at_work(thread: ThreadStack) -> bool:
    return frames.act(thread.frames).what == "nothing"


async def _of_children(worker: Worker, process: Process) -> tuple[ThreadStack, ...]:
    """Get stacks of forked children, such as DataLoader workers, one at a time: they write into the same file."""
    found: tuple[ThreadStack, ...] = ()
    if worker.probe is None:
        return found
    for child in process.children[:_MOST_CHILDREN]:
        pid, state, *words = child.split(maxsplit=2)
        if state in _STOPPED or not _stacks_by_signal(worker.probe, int(pid)):
            continue
        sent = lambda pid=int(pid): stacks.send_signal(pid, probe.SIGNAL)  # noqa: E731
        text = await stacks.written(worker.probe.stacks, sent, _CHILD)
        found += stacks.parsed(text, name=f"process {pid} {' '.join(words)}"[:80])[-1:]
    return found


def of_silent_node(node: NodeFacts, ranks: tuple[int, ...], why: str) -> NodeEvidence:
    """Return the evidence about a node that does not answer."""
    return NodeEvidence(node=node, ranks=tuple(Rank(rank=rank, node=node.node, note=why) for rank in ranks))
