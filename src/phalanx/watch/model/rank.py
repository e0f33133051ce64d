"""The state of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from phalanx.contract.events import LETTERS, UNSEEN, NodeRanks, RankInfo, RankSample
from phalanx.watch.model.series.histogram import Histogram
from phalanx.watch.model.series.rate import Rate
from phalanx.watch.model.series.strip import Strip

Health = Literal["starting", "healthy", "waiting", "slow", "debugged", "silent", "stuck", "dead", "stopped", "done"]
HEALTH: tuple[Health, ...] = (
    *("dead", "stuck", "silent", "debugged", "slow", "waiting", "starting", "healthy", "stopped", "done"),
)
STARTING = ("import", "join")  # phases before the first step

_PHASES = {letter: name for name, letter in LETTERS.items()}
_PHASES |= {letter.upper(): name for letter, name in _PHASES.items()}
_SILENT = 5.0  # seconds
_UNSAMPLED = 5.0  # seconds without a letter: the program has no probe
_WAITING = 0.8  # share of the time in a collective from which the rank only waits
_STOPPED = (None, -2, -9, -15, 130, 137, 143)  # exit codes of a worker that was stopped; None: unknown


class TimeShares(NamedTuple):
    """Shares of the time of a rank."""

    data: float = 0.0
    compute: float = 0.0
    waiting: float = 0.0


class ResourceUsage(NamedTuple):
    """What the process of a rank uses of its host and GPU."""

    cpu: float = 0.0  # cores
    memory: int = 0
    gpu: float = -1.0
    gpu_memory: int = 0


class RankExit(NamedTuple):
    """The end of a process."""

    time: float
    code: int | None  # None: unknown


@dataclass(slots=True)
class RankLocation:
    """Where a rank runs."""

    node: int = 0
    host: str = ""
    device: str = ""
    pid: int = 0


@dataclass(slots=True)
class RankActivity:
    """What a rank is doing."""

    phase: str = "import"  # the latest phase
    shares: TimeShares = field(default_factory=TimeShares)
    strip: Strip = field(default_factory=Strip)  # phases on the time axis
    _unsampled: float = 0.0  # seconds without any letter since the start; -1: at least one letter was seen
    _shares_alive: TimeShares = field(default_factory=TimeShares)  # the latest shares that were sampled

    def start(self) -> None:
        """Record that another process has taken over the rank."""
        self.phase, self._unsampled = "import", 0.0

    def end(self) -> None:
        """Record that the process has ended. Keep the earlier shares: those of a dying process mean nothing."""
        self.shares = self._shares_alive

    def apply(self, now: float, seconds: float, sample: RankSample, *, alive: bool) -> None:
        """Fold a sample."""
        phases = sample.phases
        self.shares = TimeShares(sample.data, sample.compute, sample.waiting)
        if alive and phases.strip(UNSEEN):
            self._shares_alive = self.shares
        self.strip.add(now, phases)
        last = phases[-1:] if phases[-1:] != UNSEEN else phases.rstrip(UNSEEN)[-1:]
        self.phase = _PHASES.get(last, self.phase)
        if last:
            self._unsampled = -1.0
        elif self._unsampled >= 0 and phases:
            self._unsampled += seconds
            self.phase = "idle" if self._unsampled >= _UNSAMPLED else self.phase


@dataclass(slots=True)
class RankSteps:
    """The progress and speed of a rank."""

    last: int = -1
    rate: float = 0.0  # steps per second
    samples: float = -1.0  # training samples per second; -1: unknown
    _rate: Rate = field(default_factory=Rate)
    _spent: tuple[float, float, float] = (0.0, 0.0, 0.0)  # seconds of data, compute and waiting since the last step

    def start(self) -> None:
        """Record that another process has taken over the rank."""
        self.rate, self._rate, self._spent = 0.0, Rate(), (0.0, 0.0, 0.0)

    def freeze_rate(self) -> None:
        """Keep the last rate: the run is over."""
        self.rate = 1 / self._rate.each if self._rate.each else 0.0

    def apply(self, now: float, seconds: float, sample: RankSample, times: Mapping[str, Histogram]) -> None:
        """Fold a sample. Add the duration of each new step to the histograms."""
        data, compute, waiting = self._spent
        data += sample.data * seconds
        compute += sample.compute * seconds
        waiting += sample.waiting * seconds
        steps = sample.step - self.last
        if steps > 0 and self.last >= 0:
            times["data"].add(data / steps, steps)
            times["compute"].add(compute / steps, steps)
            times["waiting"].add(waiting / steps, steps)
        self._spent = (data, compute, waiting) if steps == 0 else (0.0, 0.0, 0.0)
        self.last = sample.step
        if sample.step >= 0:
            self._rate.record(now, sample.step)
            self.rate = self._rate.at(now)


@dataclass(slots=True)
class RankView:
    """One rank: its location, activity and health."""

    rank: int
    location: RankLocation = field(default_factory=RankLocation)
    activity: RankActivity = field(default_factory=RankActivity)
    steps: RankSteps = field(default_factory=RankSteps)
    usage: ResourceUsage = field(default_factory=ResourceUsage)
    health: Health = "starting"
    silent: float = 0.0
    place: str = ""  # in its script
    debugged: bool = False
    sampled: float = 0.0  # time of the latest sample
    exit: RankExit | None = None  # None: the process runs

    @property
    def gone(self) -> bool:
        """Whether the process has ended."""
        return self.exit is not None

    @property
    def code(self) -> int | None:
        """The exit code, if the process has ended and that is known."""
        return self.exit.code if self.exit is not None else None

    def start(self, pid: int) -> None:
        """Record that another process has taken over this rank."""
        if pid != self.location.pid or self.exit is not None:
            self.location.pid, self.exit, self.debugged = pid, None, False
            self.silent, self.sampled = 0.0, 0.0
            self.activity.start()
            self.steps.start()

    def place_at(self, node: NodeRanks, info: RankInfo) -> None:
        """Record where the rank runs."""
        location = self.location
        location.node, location.host, location.device = node.node, node.host, info.device
        if info.pid and info.pid != location.pid:
            self.start(info.pid)

    def end(self, when: float, code: int | None) -> None:
        """Record that the process has ended."""
        self.exit, self.steps.rate = RankExit(when, code), 0.0
        self.activity.end()

    def apply(self, now: float, seconds: float, sample: RankSample, times: Mapping[str, Histogram]) -> None:
        """Fold a sample into the state. `times`: histograms of the seconds per step."""
        alive = sample.state not in ("X", "E")
        if alive:  # otherwise there is nothing to measure
            self.usage = ResourceUsage(sample.cpu, sample.memory, sample.gpu, sample.gpu_memory)
            self.steps.samples = sample.samples
        self.silent, self.debugged, self.place = sample.silent, sample.debugged, sample.place
        since, self.sampled = self.sampled, now
        self.activity.apply(now, seconds, sample, alive=alive)
        if not alive:
            self.steps.last = sample.step if sample.step >= 0 else self.steps.last
            self.end(now, self.code if sample.state == "X" else 0)
            return
        if self.exit is not None and now >= self.exit.time:  # otherwise the sample is older than the exit
            self.exit = None
        # Long runs keep only some samples: each one covers the time since the previous one.
        self.steps.apply(now, now - since if since and now > since else seconds, sample, times)

    def update_health(self, *, stuck: bool, slow: bool, stopped: bool = False, by_user: bool = False) -> None:
        """Set `health` to the worst that applies, in the order of HEALTH; exit code 0 is always "done".

        `stopped`: the worker was asked to exit. `by_user`: not because of a failure, so an exception that it raised
        then is not a failure either.
        """
        if self.exit is not None:
            code = self.exit.code
            ended = by_user or (stopped and code in _STOPPED)
            self.health = "done" if code == 0 else "stopped" if ended else "dead"
        elif stuck:
            self.health = "stuck"
        elif self.silent > _SILENT:
            self.health = "silent"
        elif self.debugged:
            self.health = "debugged"
        elif slow:
            self.health = "slow"
        elif self.activity.phase == "collective" and self.activity.shares.waiting >= _WAITING:
            self.health = "waiting"
        elif not self.sampled or self.activity.phase in STARTING:
            self.health = "starting"
        else:
            self.health = "healthy"
