"""The events of a run. One stream feeds the run folder and all viewers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from phalanx.contract import encoding
from phalanx.contract.run_metadata import RunMetadata

FaultKind = Literal["worker", "node-lost", "node-joined"]


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", omit_defaults=True):
    """Base of all events."""

    time: float  # seconds since 1970


class RunStarted(Event, frozen=True, kw_only=True, tag="run-started"):
    """The agent has started. First event of a run."""

    run: str  # id: the name of the run folder
    command: tuple[str, ...]  # of local rank 0
    world_size: int  # as planned before the nodes join; `ranks` has the real ones
    pid: int  # of the agent


class RunDescribed(Event, frozen=True, kw_only=True, tag="run-described"):
    """Commit, hyperparameters, versions and machine of the run are known, or have changed.

    It comes after the workers have started; a later one replaces it.
    """

    metadata: RunMetadata  # content of metadata.json, without the diff


class ForkServerReady(Event, frozen=True, kw_only=True, tag="fork-server-ready"):
    """The fork server has imported torch and accepts requests."""

    pid: int  # of the fork server
    mode: str  # cold, warm or fresh
    seconds: float  # spent on imports; 0 for a warm fork server, which has done them before
    imports: dict[str, float] = {}  # seconds per module, from 10 ms on


class ForkServerRefused(Event, frozen=True, kw_only=True, tag="fork-server-refused"):
    """Forking is not safe after these imports. Workers are started as fresh interpreters instead."""

    reason: str  # what makes a fork unsafe


class AttemptStarted(Event, frozen=True, kw_only=True, tag="attempt-started"):
    """All workers are about to be started."""

    attempt: int  # 0, and 1 more after each restart of all ranks


class WorkerStarted(Event, frozen=True, kw_only=True, tag="worker-started"):
    """A worker process has started."""

    rank: int  # global rank; meaningless for a standby worker
    pid: int  # of the worker
    device: str = ""  # empty: CPU
    attempt: int = 0  # number of the attempt
    spare: bool = False  # a standby worker without a rank


class RankChanged(Event, frozen=True, kw_only=True, tag="rank-changed"):
    """A running worker has got another rank."""

    rank: int  # the new rank
    pid: int  # of the worker
    previous_rank: int  # the rank until now


class WorkerExited(Event, frozen=True, kw_only=True, tag="worker-exited"):
    """A worker process has ended."""

    rank: int  # its last rank
    pid: int  # of the worker
    code: int = 0  # exit code, or the negative signal number
    peak_memory: int = 0  # bytes; 0: unknown, for one that was killed
    attempt: int = 0  # number of the attempt
    hung: bool = False  # killed because it was stalled


class Stopping(Event, frozen=True, kw_only=True, tag="stopping"):
    """Workers are being stopped, because of a failure or a signal to the agent."""

    reason: str  # a sentence that says why
    signal: str  # name of the signal that the workers get: SIGTERM


class WorkerFailed(Event, frozen=True, kw_only=True, tag="worker-failed"):
    """The root cause: the first worker that failed."""

    rank: int  # the rank that failed
    summary: str  # the cause, in one line
    code: int  # exit code, or the negative signal number
    attempt: int = 0  # number of the attempt
    blame: tuple[str, ...] = ()  # after a timeout: lines that name the rank that did not take part


class FaultEvent(Event, frozen=True, kw_only=True, tag="fault"):
    """The group changes because of a failure, or because a node has joined."""

    rank: int  # the rank that failed; the first rank of a lost node; 0 if a node joined
    reason: str  # a sentence that names the rank or node
    recovery: str  # regroup, restart or stop
    kind: FaultKind = "worker"  # worker, node-lost or node-joined
    idle: float = 0.0  # seconds without a committed step before it was noticed: they are lost, too


class Recovered(Event, frozen=True, kw_only=True, tag="recovered"):
    """The first step after a fault is committed."""

    generation: int  # process group generation that committed the step
    seconds: float  # from when the fault was noticed to this step
    step: int  # the committed step
    redone: int = 0  # committed steps that were lost and are computed again
    idle: float = 0.0  # that of the fault; `seconds` counts from when it was noticed


class BatchSkipped(Event, frozen=True, kw_only=True, tag="batch-skipped"):
    """The update of a step was not finite: it was dropped, and its batch skipped (`--on-nan rollback`)."""

    step: int  # the step that was dropped
    reason: str  # a sentence that says what was not finite
    seconds: float = 0.0  # that the step has cost


class GoodputMeasured(Event, frozen=True, kw_only=True, tag="goodput"):
    """What the console says at the end about lost time. Page and report show the same."""

    lost: float  # seconds lost to faults, repeated steps, skipped batches and stalls
    seconds: float  # since the first step


class Restarted(Event, frozen=True, kw_only=True, tag="restarted"):
    """All ranks have been stopped after a fault and are started again."""

    seconds: float  # since the fault was noticed
    idle: float = 0.0  # that of the fault


class Preempted(Event, frozen=True, kw_only=True, tag="preempted"):
    """The run was preempted. A checkpoint of `step` is on disk."""

    step: int  # the last committed step
    seconds: float  # since the preemption signal


class Stalled(Event, frozen=True, kw_only=True, tag="stalled"):
    """No rank makes progress. The evidence is in `folder`."""

    seconds: float  # since the last progress
    folder: str = ""  # path of the evidence: stacks of all ranks, and what was compared


class VerdictEvent(Event, frozen=True, kw_only=True, tag="verdict"):
    """Why the run is stalled, and which ranks are to blame."""

    kind: str  # data, deadlock, stopped …: the table in docs/concepts/hangs.md has all
    text: str  # one sentence with rank, place and cause
    ranks: tuple[int, ...] = ()  # ranks to blame; empty: none, or all


class Resumed(Event, frozen=True, kw_only=True, tag="resumed"):
    """A stalled run makes progress again by itself."""

    seconds: float  # how long it was stalled


class StepTiming(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Seconds per step of one rank. If no steps are known: shares of its time."""

    rank: int  # global rank
    steps: int  # number of steps; 0: unknown
    samples: int  # number of samples behind these numbers
    data: float  # waiting for input
    compute: float  # forward, backward and optimizer
    waiting: float  # waiting for other ranks
    throttled: str = ""  # why its GPU was throttled


class SlowRank(msgspec.Struct, frozen=True, kw_only=True):
    """A straggler, and a sentence about it."""

    rank: int  # global rank
    text: str  # a sentence: how slow, and at what


class StepTimingReport(Event, frozen=True, kw_only=True, tag="step-timings"):
    """What each rank has spent its time on, and which ranks were slow."""

    ranks: tuple[StepTiming, ...]  # one entry per rank
    slow: tuple[SlowRank, ...] = ()  # ranks that were slow; empty: none


class StoreLost(Event, frozen=True, kw_only=True, tag="store-lost"):
    """The store process has ended unexpectedly."""

    code: int  # exit code, or the negative signal number


class NoteEvent(Event, frozen=True, kw_only=True, tag="note"):
    """A message on the console."""

    text: str  # the message; it may have several lines
    repeats: bool = False  # another event says the same: viewers skip it


class RunEnded(Event, frozen=True, kw_only=True, tag="run-ended"):
    """The run is over. Last event of a run."""

    code: int  # exit code of the run
    seconds: float  # since the start of the agent
    preempted: bool = False  # a checkpoint is on disk, and the same command resumes it


# -- samples and metrics

LETTERS = {
    "import": "i",
    "join": "j",
    "data": "d",
    "forward": "f",
    "backward": "b",
    "collective": "w",
    "optimizer": "o",
    "checkpoint": "k",
    "compile": "c",
    "idle": "n",  # the script's own code
    "sleep": "s",  # it sleeps, but not in a collective
}
UNSEEN = "."  # not sampled


class RankInfo(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Where a rank runs on its node."""

    rank: int  # global rank
    pid: int = 0  # of the worker
    device: str = ""  # empty: CPU


class NodeRanks(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The ranks of one node, in ascending order."""

    node: int = 0  # number of the node
    host: str = ""  # name of the host
    ranks: tuple[RankInfo, ...] = ()  # one entry per rank


class RankInfos(Event, frozen=True, kw_only=True, tag="ranks"):
    """Where all ranks of all nodes run. Sent when one of them changes."""

    nodes: tuple[NodeRanks, ...]  # one entry per node

    def each(self) -> Iterator[tuple[NodeRanks, RankInfo]]:
        """Yield every rank, with its node."""
        return ((node, info) for node in self.nodes for info in node.ranks)


class RankSample(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One rank at one moment. Shares and rates cover the time since the previous sample."""

    rank: int  # global rank
    step: int = -1  # committed steps if the script reports them, else optimizer steps seen; -1: none
    phases: str = ""  # one letter (LETTERS) per tenth of a second, oldest first; a capital letter: a step ended
    data: float = 0.0  # share of the time spent on input
    compute: float = 0.0  # share spent on forward, backward and optimizer
    waiting: float = 0.0  # share spent waiting for other ranks
    cpu: float = 0.0  # cores
    memory: int = 0  # bytes
    gpu: float = -1.0  # utilization, 0 to 1; -1: unknown
    gpu_memory: int = 0  # bytes
    samples: float = -1.0  # training samples per second of this rank; -1: unknown
    state: str = "S"  # process state as in /proc; X: failed; E: exited with code 0
    silent: float = 0.0  # seconds since the last heartbeat
    debugged: bool = False  # a debugger is attached
    place: str = ""  # line of the script: train.py:41 step


class ClusterSample(Event, frozen=True, kw_only=True, tag="sample"):
    """All ranks of all nodes, once per second; with more than 1,024 nodes, once per 2 to 5 seconds.

    `time` is when the last phase letter of every rank ends, rounded to tenths of a second. A rank whose data did not
    arrive in time has no letters. For long runs samples.jsonl keeps only every 2nd, 4th, 8th … sample, unchanged:
    compute the step rate from `step` and `time` of two of them.
    """

    seconds: float  # the time that letters, shares and rates cover
    generation: int = 0  # process group generation
    ranks: tuple[RankSample, ...] = ()  # one entry per rank


class MetricsMeasured(Event, frozen=True, kw_only=True, tag="metrics"):
    """What the training reports about a committed step. None: not a finite number.

    At most five per second; samples.jsonl of a long run keeps fewer. For a plain script: the loss that rank 0 prints.
    """

    step: int  # the committed step
    values: dict[str, float | None]  # by name: loss, accuracy
    epoch: int = 0  # counted from 1, or as the script prints it; 0: unknown
    epochs: int = 0  # 0: unknown
    total: int = 0  # planned steps; 0: unknown
    samples: float = -1.0  # training samples per second of all ranks


class RendezvousProgress(Event, frozen=True, kw_only=True, tag="rendezvous"):
    """Which nodes have joined so far."""

    expected: int  # number of nodes that are expected
    joined: tuple[str, ...]  # hosts that have joined
    missing: tuple[str, ...] = ()  # hosts that have not joined, as far as their names are known
    text: str = ""  # what the leader waits for; empty: all have joined


class LinkMeasured(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Latency and bandwidth between two hosts."""

    one: str  # a host
    other: str  # another host
    latency: float  # seconds
    there: float  # bytes per second, from `one` to `other`
    back: float  # bytes per second, from `other` to `one`


class Links(Event, frozen=True, kw_only=True, tag="links"):
    """The links between the hosts of this run, as `phalanx doctor` measured them."""

    measured: float  # when, in seconds since 1970
    pairs: tuple[LinkMeasured, ...]  # one entry per pair of hosts


AnyEvent = (
    RunStarted
    | RunDescribed
    | ForkServerReady
    | ForkServerRefused
    | AttemptStarted
    | WorkerStarted
    | RankChanged
    | WorkerExited
    | Stopping
    | WorkerFailed
    | FaultEvent
    | Recovered
    | Restarted
    | BatchSkipped
    | GoodputMeasured
    | Preempted
    | Stalled
    | VerdictEvent
    | Resumed
    | StepTimingReport
    | StoreLost
    | NoteEvent
    | RankInfos
    | ClusterSample
    | MetricsMeasured
    | RendezvousProgress
    | Links
    | RunEnded
)

_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def encode(event: Event) -> bytes:
    """Return `event` as one line of events.jsonl."""
    return encoding.encode(event) + b"\n"


def decode(line: bytes) -> AnyEvent:
    """Return the event of one line. Raises msgspec.MsgspecError: a full disk may have cut it within a character."""
    try:
        return _decoder.decode(line)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from None
