"""The state of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from phalanx.contract.events import LETTERS, UNSEEN, RankInfo, RankSample
from phalanx.watch.model.histogram import Histogram
from phalanx.watch.model.rate import Rate
from phalanx.watch.model.strip import Strip

Health = Literal["starting", "healthy", "waiting", "slow", "debugged", "silent", "stuck", "dead", "stopped", "done"]
HEALTH: tuple[Health, ...] = (
    *("dead", "stuck", "silent", "debugged", "slow", "waiting", "starting", "healthy", "stopped", "done"),
)

_PHASES = {letter: name for name, letter in LETTERS.items()}
_PHASES |= {letter.upper(): name for letter, name in _PHASES.items()}
_STARTING = ("import", "join")
_SILENT = 5.0  # seconds
_UNSAMPLED = 5.0  # seconds without a letter: the program has no probe
_WAITING = 0.8  # share of the time in a collective from which the rank only waits
_STOPPED = (None, -2, -9, -15, 130, 137, 143)  # exit codes of a worker that was stopped; None: unknown


@dataclass(slots=True)
class RankView:
    """One rank: where it runs, what it does, how it is."""

    rank: int
    node: int = 0
    host: str = ""
    device: str = ""
    pid: int = 0
    health: Health = "starting"
    phase: str = "import"  # the latest phase
    step: int = -1
    rate: float = 0.0  # steps per second
    samples: float = -1.0  # training samples per second; -1: unknown
    data: float = 0.0  # shares of the time
    compute: float = 0.0
    waiting: float = 0.0
    cpu: float = 0.0
    memory: int = 0
    gpu: float = -1.0
    gpu_memory: int = 0
    silent: float = 0.0
    place: str = ""
    strip: Strip = field(default_factory=Strip)  # phases on the time axis
    code: int | None = None  # exit code, if it has ended and that is known
    gone: bool = False  # the process has ended
    debugged: bool = False
    sampled: float = 0.0  # time of the latest sample
    ended_at: float = 0.0
    _unsampled: float = 0.0  # seconds without any letter since the start; -1: there was one
    _rate: Rate = field(default_factory=Rate)
    _spent: tuple[float, float, float] = (0.0, 0.0, 0.0)  # seconds of data, compute and waiting since the last step
    _shares: tuple[float, float, float] = (0.0, 0.0, 0.0)  # the latest shares that were sampled

    def start(self, pid: int) -> None:
        """Record that another process has this rank."""
        if pid != self.pid or self.gone:
            self.pid, self.code, self.gone, self.debugged = pid, None, False, False
            self.phase, self.silent, self.rate, self.sampled = "import", 0.0, 0.0, 0.0
            self._rate, self._spent, self._unsampled = Rate(), (0.0, 0.0, 0.0), 0.0

    def place_at(self, info: RankInfo) -> None:
        """Record where the rank runs."""
        self.node, self.host, self.device = info.node, info.host, info.device
        if info.pid and info.pid != self.pid:
            self.start(info.pid)

    def end(self, when: float, code: int | None) -> None:
        """Record that the process has ended."""
        self.ended_at, self.code, self.gone, self.rate = when, code, True, 0.0
        self.data, self.compute, self.waiting = self._shares  # shares of a dying process mean nothing

    def freeze_rate(self) -> None:
        """Show how fast the rank was: the run is over."""
        self.rate = 1 / self._rate.each if self._rate.each else 0.0

    def apply(self, now: float, seconds: float, sample: RankSample, times: Mapping[str, Histogram]) -> None:
        """Fold a sample into the state. `times`: histograms of the seconds per step."""
        self.data, self.compute, self.waiting = sample.data, sample.compute, sample.waiting
        if sample.state not in ("X", "E"):  # else there is nothing to measure
            if sample.phases.strip(UNSEEN):
                self._shares = (sample.data, sample.compute, sample.waiting)
            self.cpu, self.memory, self.samples = sample.cpu, sample.memory, sample.samples
            self.gpu, self.gpu_memory = sample.gpu, sample.gpu_memory
        self.silent, self.debugged, self.place = sample.silent, sample.debugged, sample.place
        since, self.sampled = self.sampled, now
        phases = sample.phases
        self.strip.add(now, phases)
        last = phases[-1:] if phases[-1:] != UNSEEN else phases.rstrip(UNSEEN)[-1:]
        self.phase = _PHASES.get(last, self.phase)
        if last:
            self._unsampled = -1.0
        elif self._unsampled >= 0 and phases:
            self._unsampled += seconds
            self.phase = "idle" if self._unsampled >= _UNSAMPLED else self.phase
        if sample.state in ("X", "E"):
            self.step = sample.step if sample.step >= 0 else self.step
            self.end(now, self.code if sample.state == "X" else 0)
            return
        if self.gone and now >= self.ended_at:  # else the sample is older than the end
            self.gone, self.code = False, None
        # Long runs keep only some samples: each one stands for the time since the one before it.
        self._count(now, now - since if since and now > since else seconds, sample, times)

    def _count(self, now: float, seconds: float, sample: RankSample, times: Mapping[str, Histogram]) -> None:
        """Add to the histograms what each new step has taken."""
        data, compute, waiting = self._spent
        data += sample.data * seconds
        compute += sample.compute * seconds
        waiting += sample.waiting * seconds
        steps = sample.step - self.step
        if steps > 0 and self.step >= 0:
            times["data"].add(data / steps, steps)
            times["compute"].add(compute / steps, steps)
            times["waiting"].add(waiting / steps, steps)
        self._spent = (data, compute, waiting) if steps == 0 else (0.0, 0.0, 0.0)
        self.step = sample.step
        if sample.step >= 0:
            self._rate.record(now, sample.step)
            self.rate = self._rate.at(now)

    def update_health(self, *, stuck: bool, slow: bool, stopped: bool = False) -> None:
        """Set `health` to the worst that applies, in the order of HEALTH; exit code 0 is always "done".

        `stopped`: the worker was asked to end.
        """
        if self.gone:
            self.health = "done" if self.code == 0 else "stopped" if stopped and self.code in _STOPPED else "dead"
        elif stuck:
            self.health = "stuck"
        elif self.silent > _SILENT:
            self.health = "silent"
        elif self.debugged:
            self.health = "debugged"
        elif slow:
            self.health = "slow"
        elif self.phase == "collective" and self.waiting >= _WAITING:
            self.health = "waiting"
        elif not self.sampled or self.phase in _STARTING:
            self.health = "starting"
        else:
            self.health = "healthy"
