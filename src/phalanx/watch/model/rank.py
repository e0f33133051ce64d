"""One rank, as it is seen now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from phalanx.contract.events import LETTERS, UNSEEN, RankInfo, RankSample
from phalanx.watch.model.histogram import Histogram
from phalanx.watch.model.rate import Rate
from phalanx.watch.model.strip import Strip

Health = Literal["coming", "well", "waiting", "slow", "debugged", "silent", "stuck", "dead", "stopped", "done"]
HEALTH: tuple[Health, ...] = (
    *("dead", "stuck", "silent", "debugged", "slow", "waiting", "coming", "well", "stopped", "done"),
)

_PHASES = {letter: name for name, letter in LETTERS.items()}
_PHASES |= {letter.upper(): name for letter, name in _PHASES.items()}
_COMING = ("import", "join")
_SILENT = 5.0  # seconds
_BLIND = 5.0  # seconds without a letter: it is a program that nobody can look into
_WAITING = 0.8  # of its time, and still: it does nothing else
_STOPPED = (None, -2, -9, -15, 130, 137, 143)  # how one ends that was told to; None: nobody says


@dataclass(slots=True)
class RankView:
    rank: int
    node: int = 0
    host: str = ""
    device: str = ""
    pid: int = 0
    health: Health = "coming"
    phase: str = "import"  # the last that was seen
    step: int = -1
    rate: float = 0.0  # steps a second
    samples: float = -1.0  # a second; -1: it does not tell
    data: float = 0.0  # shares of its time
    compute: float = 0.0
    waiting: float = 0.0
    cpu: float = 0.0
    memory: int = 0
    gpu: float = -1.0
    gpu_memory: int = 0
    silent: float = 0.0
    place: str = ""
    strip: Strip = field(default_factory=Strip)  # its phases on the time axis
    code: int | None = None  # that it has ended with, where that is known
    gone: bool = False  # it has ended
    debugged: bool = False
    seen: float = 0.0  # when it was last looked at
    _ended: float = 0.0
    _blind: float = 0.0  # seconds that it has been there, and no letter was seen yet; -1: one was
    _pace: Rate = field(default_factory=Rate)
    _spent: tuple[float, float, float] = (0.0, 0.0, 0.0)  # seconds of data, compute and waiting since its last step
    _shares: tuple[float, float, float] = (0.0, 0.0, 0.0)  # when anything of it was last seen

    def born(self, pid: int) -> None:
        """Another process has this rank now."""
        if pid != self.pid or self.gone:
            self.pid, self.code, self.gone, self.debugged = pid, None, False, False
            self.phase, self.silent, self.rate, self.seen = "import", 0.0, 0.0, 0.0
            self._pace, self._spent, self._blind = Rate(), (0.0, 0.0, 0.0), 0.0

    def sits(self, face: RankInfo) -> None:
        self.node, self.host, self.device = face.node, face.host, face.device
        if face.pid and face.pid != self.pid:
            self.born(face.pid)

    def ended(self, when: float, code: int | None) -> None:
        self._ended, self.code, self.gone, self.rate = when, code, True, 0.0
        self.data, self.compute, self.waiting = self._shares  # a process that ends is not at anything

    @property
    def since(self) -> float:
        """When it has ended."""
        return self._ended

    def rests(self) -> None:
        """The run is over: how fast it was says more than that it stands still."""
        self.rate = 1 / self._pace.each if self._pace.each else 0.0

    def glance(self, now: float, seconds: float, glance: RankSample, times: Mapping[str, Histogram]) -> None:
        self.data, self.compute, self.waiting = glance.data, glance.compute, glance.waiting
        if glance.state not in ("X", "E"):  # of what is gone nothing can be measured
            if glance.phases.strip(UNSEEN):
                self._shares = (glance.data, glance.compute, glance.waiting)
            self.cpu, self.memory, self.samples = glance.cpu, glance.memory, glance.samples
            self.gpu, self.gpu_memory = glance.gpu, glance.gpu_memory
        self.silent, self.debugged, self.place = glance.silent, glance.debugged, glance.place
        since, self.seen = self.seen, now
        phases = glance.phases
        self.strip.add(now, phases)
        last = phases[-1:] if phases[-1:] != UNSEEN else phases.rstrip(UNSEEN)[-1:]
        self.phase = _PHASES.get(last, self.phase)
        if last:
            self._blind = -1.0
        elif self._blind >= 0 and phases:
            self._blind += seconds
            self.phase = "idle" if self._blind >= _BLIND else self.phase
        if glance.state in ("X", "E"):
            self.step = glance.step if glance.step >= 0 else self.step
            self.ended(now, self.code if glance.state == "X" else 0)
            return
        if self.gone and now >= self._ended:  # else it was seen before it died
            self.gone, self.code = False, None
        # Of a long run only some sights are kept: what each of them has seen stands for the time since the one before.
        self._count(now, now - since if since and now > since else seconds, glance, times)

    def _count(self, now: float, seconds: float, glance: RankSample, times: Mapping[str, Histogram]) -> None:
        """How long its steps take, and what for."""
        data, compute, waiting = self._spent
        data += glance.data * seconds
        compute += glance.compute * seconds
        waiting += glance.waiting * seconds
        steps = glance.step - self.step
        if steps > 0 and self.step >= 0:
            times["data"].add(data / steps, steps)
            times["compute"].add(compute / steps, steps)
            times["waiting"].add(waiting / steps, steps)
        self._spent = (data, compute, waiting) if steps == 0 else (0.0, 0.0, 0.0)
        self.step = glance.step
        if glance.step >= 0:
            self._pace.see(now, glance.step)
            self.rate = self._pace.at(now)

    def judge(self, *, stuck: bool, slow: bool, stopped: bool = False) -> None:
        """The worst that is true of it: the order of HEALTH. Who has ended with 0 is done, whatever else there was.
        `stopped`: that it has ended since is what was asked for."""
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
        elif not self.seen or self.phase in _COMING:
            self.health = "coming"
        else:
            self.health = "well"
