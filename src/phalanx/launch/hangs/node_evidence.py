"""What the ranks of this node say when a run stands still, and what the kernel and the driver say about them.

All ranks are asked at once. Who does not answer holds Python's lock, is stopped, or is no Python of ours: its stacks
come by a signal, or by py-spy. Nothing here waits for longer than its limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from phalanx.contract import encoding
from phalanx.diagnose import frames
from phalanx.diagnose.evidence import CallEvidence, Frame, GroupEvidence, History, NodeFacts, Process, Rank, ThreadStack
from phalanx.diagnose.rules.timeouts import Timeout
from phalanx.forkserver import linux
from phalanx.forkserver.probe import probe
from phalanx.launch.hangs import stacks
from phalanx.launch.hangs.source_lines import Sources
from phalanx.launch.runs import root_cause
from phalanx.launch.telemetry import gpus, process_stats

if TYPE_CHECKING:
    from phalanx.launch.agent.probes import ProbeClient
    from phalanx.launch.agent.worker import Worker, Workers
    from phalanx.launch.telemetry.process_stats import ProcessStatsReader

ANSWER = 1.2  # seconds for a rank to tell: on a crowded machine it has to get to it
_SILENT = 1.0  # for one that has published nothing for so long, a moment is enough
_MOMENT = 0.3
_STACKS = 0.7  # for one that has not, to write its stacks
_LOOKS = 0.05  # between two looks at how often a main thread wakes
_WAKES = 4  # times in between: it waits for Python's lock
_CHILD = 0.15  # for a child of it
_SPY = 1.2
_DRIVER = 1.2  # for the GPUs' driver, which may hang when one of them is lost
LONGEST = ANSWER + _STACKS + _SPY + 1.0
_MOST_CHILDREN = 8  # of a rank, whose stacks are taken
_MOST_RECORDED = 100_000  # collectives of a rank
_STOPPED = ("T", "t", "Z", "X")


class NodeEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Of one node."""

    node: NodeFacts
    ranks: tuple[Rank, ...]


class EvidenceReply(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank's probe answers."""

    threads: tuple[ThreadStack, ...] = ()
    groups: tuple[GroupEvidence, ...] = ()
    calls: tuple[CallEvidence, ...] = ()
    history: History = History()
    store: str = ""
    given: str = ""
    hosts: bool = False


_decoder: msgspec.json.Decoder[NodeEvidence] = msgspec.json.Decoder(NodeEvidence)


def encode(testimony: NodeEvidence) -> bytes:
    return encoding.encode(testimony)


def decode(text: bytes) -> NodeEvidence:
    return _decoder.decode(text)


async def take(attempt: Workers, looks: ProcessStatsReader, node: NodeFacts) -> NodeEvidence:
    """Of all ranks here, the dead ones too."""
    workers = {name: worker for name, worker in attempt.workers.items() if not worker.spare}
    pids = [worker.pid for worker in workers.values() if worker.code is None and worker.pid]
    below = await asyncio.to_thread(linux.families, pids)
    cards, ranks = await asyncio.gather(
        gpus.asked([worker.seat.slot.device for worker in workers.values()], _DRIVER, health=True),
        asyncio.gather(*(_rank(attempt, name, worker, looks, below) for name, worker in workers.items())),
    )
    found = [replace(rank, node=node.node, gpu=card) for rank, card in zip(ranks, cards, strict=True)]
    return NodeEvidence(node=node, ranks=await asyncio.to_thread(_annotated, found))


async def rank(attempt: Workers, name: str, worker: Worker, looks: ProcessStatsReader) -> Rank:
    """Of one."""
    below = await asyncio.to_thread(linux.families, [worker.pid])
    return await _rank(attempt, name, worker, looks, below)


def _annotated(ranks: list[Rank]) -> tuple[Rank, ...]:
    return tuple(map(Sources().annotated, ranks))


async def _rank(
    attempt: Workers, name: str, worker: Worker, looks: ProcessStatsReader, below: dict[int, list[int]]
) -> Rank:
    number = worker.seat.rank
    bare = Rank(rank=number, node=0, device=str(worker.seat.slot.device or ""), debugged=number in attempt.debugged)
    if (over := _over(bare, attempt, worker)) is not None:
        return over
    if not worker.pid:
        return replace(bare, note="it has not been started yet")
    pulse = looks.pulse(worker.pid)
    told, why = await _ask(worker, pulse.state)
    process = await asyncio.to_thread(process_stats.look, worker.pid, pulse, below.get(worker.pid, []))
    threads, note = stacks.clean(told.threads), why
    if not any(thread.frames for thread in threads):
        threads, note = await _stacks(attempt, name, worker, pulse.state, why)
    threads += await _of_children(worker, process)
    if (over := _over(bare, attempt, worker)) is not None:  # meanwhile
        return replace(over, process=process)
    page = worker.probe.page if worker.probe is not None else None
    # At its end it has no probe any more: then silence says nothing.
    looked = page.looked if page is not None and not page.text.get("ending") else 0.0
    return replace(
        bare,
        threads=threads,
        groups=told.groups,
        calls=told.calls,
        history=told.history,
        store=told.store,
        given=told.given,
        hosts=told.hosts,
        process=process,
        silent=round(time.monotonic() - looked, 1) if looked and not told.threads else 0.0,
        note=note,
    )


def _over(bare: Rank, attempt: Workers, worker: Worker) -> Rank | None:
    """Of one that has ended, or is about to because others did not come; None: it goes on."""
    if worker.code or worker.ending > time.monotonic():
        death = attempt.death(worker)
        if root_cause.gave_up(death):
            return _gave_up(bare, worker, death)
    return replace(bare, ended=worker.code) if worker.code is not None else None


def _gave_up(bare: Rank, worker: Worker, death: root_cause.ProcessFailure) -> Rank:
    """Where it waited for others, as if it still did: they did not come there."""
    told = EvidenceReply()
    with contextlib.suppress(msgspec.ValidationError, TypeError, ValueError, KeyError):
        told = read(worker.raised) if worker.raised is not None else told
    threads = stacks.clean(told.threads)
    if not any(thread.frames for thread in threads):  # it could not tell: there is its traceback
        lines = reversed(root_cause.report_of(death).stack)
        frames = tuple(Frame(file, number, function) for file, number, function, _ in lines)
        threads = (ThreadStack(name="MainThread", frames=frames, main=True),)
    timeout = root_cause.timeout(death) or Timeout()
    calls = _undone(told.calls, {frame.function for thread in threads if thread.main for frame in thread.frames})
    if timeout.seq:  # NCCL's watchdog names the call, and ends the process without an exception
        calls = (*calls, CallEvidence(group=timeout.group, seq=timeout.seq, op=timeout.op))
    found = replace(bare, threads=threads, groups=told.groups, calls=calls, history=told.history)
    return replace(found, store=told.store, given=told.given, hosts=told.hosts)


def _undone(calls: tuple[CallEvidence, ...], functions: set[str]) -> tuple[CallEvidence, ...]:
    """torch takes a call that failed for one that is over."""
    last = calls[-1:]
    if last and last[0].done and (last[0].op in functions or "_engine_run_backward" in functions):
        return (*calls[:-1], replace(last[0], done=False))
    return calls


async def _ask(worker: Worker, state: str) -> tuple[EvidenceReply, str]:
    if worker.probe is None:
        return EvidenceReply(), "it has no probe"
    if state in _STOPPED:
        return EvidenceReply(), "it is stopped, and answers nobody" if state in "Tt" else "it is dead"
    looked = worker.probe.page.looked
    limit = _MOMENT if looked and time.monotonic() - looked > _SILENT else ANSWER
    answer = await worker.probe.ask("report", timeout=limit)
    if answer is None:
        return EvidenceReply(), f"it has not answered for {limit} s"
    try:
        return read(answer), str(answer.get("why", ""))
    except (msgspec.ValidationError, TypeError, ValueError, KeyError) as error:
        return EvidenceReply(), f"what it says cannot be read: {error}"


def read(answer: dict[str, Any]) -> EvidenceReply:
    """Frames come as [file, line, function]: most of an answer is frames."""
    threads = [{**thread, "frames": _framed(thread["frames"])} for thread in answer.get("threads", ())]
    calls = [{**call, "site": _framed(call.get("site", ()))} for call in answer.get("calls", ())]
    rest: dict[str, Any] = {name: answer[name] for name in ("groups", "store", "given", "hosts") if name in answer}
    found = msgspec.convert({"threads": threads, "calls": calls, **rest}, EvidenceReply, strict=False)
    return replace(found, history=_history(answer.get("history") or {}))


def _history(told: dict[str, Any]) -> History:
    """A script may write what it likes where its records are: what does not fit together is left out."""
    try:
        sites = [_framed(site) for site in told.get("sites", ())[:_MOST_RECORDED]]
        found = msgspec.convert({**told, "sites": sites}, History, strict=False)
    except (msgspec.ValidationError, TypeError, ValueError, AttributeError):
        return History()
    recorded = sum(len(each.seqs) for each in found.groups)
    fits = all(
        len(each.seqs) == len(each.kinds) and all(0 <= kind < len(found.signatures) for kind in each.kinds)
        for each in found.groups
    )
    sited = all(-1 <= each.site < len(found.sites) for each in found.signatures)
    return found if fits and sited and recorded <= _MOST_RECORDED else History()


def _framed(frames: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    return [{"file": _plain(file), "line": line, "function": _plain(function)} for file, line, function in frames]


def _plain(name: str) -> str:
    """A file may be called by bytes that are no text, which JSON has no letters for."""
    return name if name.isascii() else name.encode(errors="replace").decode()


async def _stacks(
    attempt: Workers, name: str, worker: Worker, state: str, why: str
) -> tuple[tuple[ThreadStack, ...], str]:
    """By itself from C, or from outside. Its probe does not get Python's lock, so that another thread has it."""
    if worker.probe is not None and state not in _STOPPED and _stacks_by_signal(worker.probe, worker.pid):
        sent = lambda: attempt.tell(name, probe.SIGNAL, alone=True)  # noqa: E731
        threads = stacks.parsed(await stacks.written(worker.probe.stacks, sent, _STACKS))
        looked = worker.probe.page.looked
        if threads and looked and time.monotonic() - looked > _SILENT:
            threads = await _with_holder(worker.pid, threads)
        if any(thread.frames for thread in threads):
            return threads, why
    threads, trouble = await stacks.spied(worker.pid, native=state not in _STOPPED, limit=_SPY)
    return threads, "; ".join(filter(None, (why, trouble)))


def _stacks_by_signal(shown: ProbeClient, pid: int) -> bool:
    """Not to whoever has another handler for it: a program that was executed, or a script with a use for it. Nor to one
    that has closed the file."""
    if not linux.handles(pid, probe.SIGNAL) or shown.page.text.get("signal_taken"):
        return False
    with contextlib.suppress(OSError):
        ours = os.readlink(f"/proc/self/fd/{shown.stacks}")
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{fd}") == ours:
                    return True
    return False


async def _with_holder(pid: int, threads: tuple[ThreadStack, ...]) -> tuple[ThreadStack, ...]:
    """Who has Python's lock: the main thread, unless that waits for it, and wakes every 5 ms to look. Then it is
    another, if only one is seen to wait for nothing."""
    before = process_stats.switches(pid)
    await asyncio.sleep(_LOOKS)
    return holder(threads, waits=process_stats.switches(pid) - before >= _WAKES)


def holder(threads: tuple[ThreadStack, ...], *, waits: bool) -> tuple[ThreadStack, ...]:
    """`waits`: the main thread does, for the lock."""
    able = [each for each in threads if each.main is not waits and (each.main or _at_work(each))]
    return tuple(replace(each, holds_gil=[each] == able) for each in threads)


def _at_work(thread: ThreadStack) -> bool:
    return frames.act(thread.frames).what == "nothing"


async def _of_children(worker: Worker, process: Process) -> tuple[ThreadStack, ...]:
    """Of those that the rank has forked, which have its handler: workers of a DataLoader. One after the other, for they
    write into the same file."""
    found: tuple[ThreadStack, ...] = ()
    if worker.probe is None:
        return found
    for child in process.children[:_MOST_CHILDREN]:
        pid, state, *words = child.split(maxsplit=2)
        if state in _STOPPED or not _stacks_by_signal(worker.probe, int(pid)):
            continue
        sent = lambda pid=int(pid): stacks.poke(pid, probe.SIGNAL)  # noqa: E731
        text = await stacks.written(worker.probe.stacks, sent, _CHILD)
        found += stacks.parsed(text, name=f"process {pid} {' '.join(words)}"[:80])[-1:]
    return found


def silent(node: NodeFacts, ranks: tuple[int, ...], why: str) -> NodeEvidence:
    """Of a node that does not answer, which is evidence too."""
    return NodeEvidence(node=node, ranks=tuple(Rank(rank=rank, node=node.node, note=why) for rank in ranks))
