"""What happens in a run, as typed events: one stream feeds the log files and everything that watches."""

from __future__ import annotations

import msgspec

from phalanx.contract import encoding


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", omit_defaults=True):
    time: float


class RunStarted(Event, frozen=True, kw_only=True, tag="run-started"):
    run: str
    command: tuple[str, ...]
    world_size: int
    pid: int


class ForkServerReady(Event, frozen=True, kw_only=True, tag="fork-server-ready"):
    pid: int
    way: str  # cold, warm or fresh
    seconds: float
    imports: dict[str, float] = {}


class ForkServerRefused(Event, frozen=True, kw_only=True, tag="fork-server-refused"):
    """It is not safe to fork after these imports: fresh interpreters are started instead."""

    reason: str


class AttemptStarted(Event, frozen=True, kw_only=True, tag="attempt-started"):
    attempt: int


class WorkerBorn(Event, frozen=True, kw_only=True, tag="worker-born"):
    rank: int
    pid: int
    device: str = ""
    attempt: int = 0
    spare: bool = False  # it has no rank yet


class WorkerSeated(Event, frozen=True, kw_only=True, tag="worker-seated"):
    """A living worker has another rank now."""

    rank: int
    pid: int
    was: int


class WorkerExited(Event, frozen=True, kw_only=True, tag="worker-exited"):
    rank: int
    pid: int
    code: int = 0  # the exit code, or minus the signal
    peak_memory: int = 0
    attempt: int = 0
    hung: bool = False  # it was killed because it was stalled


class Stopping(Event, frozen=True, kw_only=True, tag="stopping"):
    """Workers are being ended: by a failure, or by a signal to the agent."""

    reason: str
    signal: str


class WorkerFailed(Event, frozen=True, kw_only=True, tag="worker-failed"):
    """The first cause: the worker that made the run fail."""

    rank: int
    summary: str
    code: int
    attempt: int = 0
    blame: tuple[str, ...] = ()  # of one that timed out: which rank did not come, in lines


class FaultEvent(Event, frozen=True, kw_only=True, tag="fault"):
    """A worker has failed, and this is done about it: regroup, restart or stop."""

    rank: int
    reason: str
    recovery: str
    joins: bool = False  # nobody has failed: a node has come, for which the group forms anew


class Recovered(Event, frozen=True, kw_only=True, tag="recovered"):
    """The first step after a fault is committed."""

    generation: int
    seconds: float
    step: int
    redone: int = 0  # steps that had been committed, and were lost


class Restarted(Event, frozen=True, kw_only=True, tag="restarted"):
    """All ranks were ended after a fault, and are started again."""

    seconds: float  # since the fault


class Preempted(Event, frozen=True, kw_only=True, tag="preempted"):
    """The run ends for now: this step is in a checkpoint."""

    step: int
    seconds: float  # since it was asked for


class Stalled(Event, frozen=True, kw_only=True, tag="stalled"):
    """No rank goes on; what is known about it lies in `folder`."""

    seconds: float
    folder: str = ""


class VerdictEvent(Event, frozen=True, kw_only=True, tag="verdict"):
    """Why it stands still, and whose fault it is."""

    kind: str
    text: str
    ranks: tuple[int, ...] = ()


class Resumed(Event, frozen=True, kw_only=True, tag="resumed"):
    """It goes on by itself after all."""

    seconds: float  # that it stood still


class StepTiming(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Seconds a step; without steps: parts of its time."""

    rank: int
    steps: int
    looks: int  # that this is known from
    data: float
    compute: float
    waiting: float
    throttled: str = ""  # why its GPU was slowed down


class StepTimingReport(Event, frozen=True, kw_only=True, tag="paces"):
    """What each rank has spent its time on, and who held the others up."""

    ranks: tuple[StepTiming, ...]
    late: tuple[str, ...] = ()  # a sentence each


class StoreLost(Event, frozen=True, kw_only=True, tag="store-lost"):
    code: int


class Note(Event, frozen=True, kw_only=True, tag="note"):
    """A line of the console."""

    text: str
    repeats: bool = False  # what an event has just told: for the console alone


class RunEnded(Event, frozen=True, kw_only=True, tag="run-ended"):
    code: int
    seconds: float


# -- what is to be seen of a run, all the time

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
    "idle": "n",
}
UNSEEN = "."  # nobody has looked


class RankInfo(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Who sits where."""

    rank: int
    node: int = 0
    host: str = ""
    device: str = ""  # empty: a CPU
    pid: int = 0


class RankInfos(Event, frozen=True, kw_only=True, tag="faces"):
    """All ranks of all nodes, each time that one of them is another."""

    ranks: tuple[RankInfo, ...]


class RankSample(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """At one rank. Shares and rates are of the time since the sight before."""

    rank: int
    step: int = -1  # committed, as far as it tells; else optimizer steps that were seen; -1: none
    phases: str = ""  # a letter (LETTERS) for every tenth of a second, the oldest first; a capital: a step has ended
    data: float = 0.0  # shares of its time
    compute: float = 0.0
    waiting: float = 0.0
    cpu: float = 0.0  # cores
    memory: int = 0  # bytes
    gpu: float = -1.0  # use, 0 to 1; -1: unknown
    gpu_memory: int = 0  # bytes
    samples: float = -1.0  # of its own, a second; -1: it does not tell
    state: str = "S"  # as the kernel says it; X: it has died; E: it has ended well
    silent: float = 0.0  # seconds
    debugged: bool = False
    place: str = ""  # of the script: train.py:41 step


class ClusterSample(Event, frozen=True, kw_only=True, tag="sight"):
    """All ranks of all nodes, once a second. `time` is when the last letter of every rank ends, in whole tenths; a rank
    of whom nothing came in time has no letters.

    In samples.jsonl, of a long run, only every 2nd, 4th, 8th … one is kept, each as it was: between them nothing was
    seen, and how fast steps went is what `step` and `time` of two of them say."""

    seconds: float  # that it is about: letters, shares and rates
    generation: int = 0
    ranks: tuple[RankSample, ...] = ()


class MetricsMeasured(Event, frozen=True, kw_only=True, tag="measured"):
    """What a training says of a step that it has committed; None: it is not a number. At most five a second, and in
    samples.jsonl, of a long run, more seldom. Of a plain script: the loss that rank 0 prints."""

    step: int
    values: dict[str, float | None]
    epoch: int = 0
    total: int = 0  # steps that it is going to make; 0: it does not tell
    samples: float = -1.0  # of all ranks, a second


class RollCall(Event, frozen=True, kw_only=True, tag="roll-call"):
    """Nodes come together."""

    expected: int
    here: tuple[str, ...]
    missing: tuple[str, ...] = ()
    text: str = ""


class LinkMeasured(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    one: str  # hosts
    other: str
    latency: float  # seconds
    there: float  # bytes a second
    back: float


class Links(Event, frozen=True, kw_only=True, tag="links"):
    """What the doctor has measured between the hosts of this run, and when."""

    measured: float
    pairs: tuple[LinkMeasured, ...]


AnyEvent = (
    RunStarted
    | ForkServerReady
    | ForkServerRefused
    | AttemptStarted
    | WorkerBorn
    | WorkerSeated
    | WorkerExited
    | Stopping
    | WorkerFailed
    | FaultEvent
    | Recovered
    | Restarted
    | Preempted
    | Stalled
    | VerdictEvent
    | Resumed
    | StepTimingReport
    | StoreLost
    | Note
    | RankInfos
    | ClusterSample
    | MetricsMeasured
    | RollCall
    | Links
    | RunEnded
)

_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def encode(event: Event) -> bytes:
    """One line of events.jsonl."""
    return encoding.encode(event) + b"\n"


def decode(line: bytes) -> AnyEvent:
    """Raises msgspec.MsgspecError, whatever it is: a disk that was full may have cut a line within a letter."""
    try:
        return _decoder.decode(line)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from None
