"""What is to be seen of a run: one event after the other is folded into it. Pure: time is what events say."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from phalanx.contract import events
from phalanx.watch.curve import Curve
from phalanx.watch.strip import Strip

Health = Literal["coming", "well", "waiting", "slow", "debugged", "silent", "stuck", "dead", "done"]
State = Literal["gathering", "starting", "running", "stalled", "recovering", "stopping", "done", "failed"]
KINDS = (
    "joined",
    "fault",
    "recovered",
    "restarted",
    "stalled",
    "verdict",
    "resumed",
    "slow",
    "preempted",
    "note",
    "end",
)


@dataclass
class RankView:
    rank: int
    node: int = 0
    host: str = ""
    device: str = ""
    pid: int = 0
    health: Health = "coming"
    phase: str = "import"
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


@dataclass(frozen=True)
class Happening:
    """Something that people are told, on the time axis."""

    time: float
    kind: str  # one of KINDS
    text: str
    ranks: tuple[int, ...] = ()
    seconds: float = 0.0  # that it took, or lasted


@dataclass
class Scene:
    run: str = ""
    command: tuple[str, ...] = ()
    state: State = "starting"
    started: float = 0.0
    now: float = 0.0  # of the last event
    ended: float | None = None
    code: int | None = None
    world_size: int = 0
    generation: int = 0
    attempt: int = 0
    step: int = -1  # the furthest
    total: int = 0
    epoch: int = 0
    rate: float = 0.0  # steps a second
    samples: float = -1.0  # of all ranks, a second
    goodput: float = 1.0  # share of the time since the first step in which steps were made that counted
    lost: float = 0.0  # seconds that faults and stalls have cost
    ranks: dict[int, RankView] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)  # loss, …, "steps/s", "samples/s"
    happenings: deque[Happening] = field(default_factory=lambda: deque(maxlen=500))
    verdicts: list[Happening] = field(default_factory=list)  # that stand now
    roll: events.RollCall | None = None  # until everybody is here
    links: events.Links | None = None

    def see(self, event: events.AnyEvent) -> None:
        self.now = max(self.now, event.time)
        match event:
            case events.RunStarted():
                self.run, self.command, self.started = event.run, event.command, event.time
                self.world_size = event.world_size
            case events.Faces():
                self.world_size = len(event.ranks)
                for face in event.ranks:
                    view = self.ranks.setdefault(face.rank, RankView(face.rank))
                    view.node, view.host, view.device, view.pid = face.node, face.host, face.device, face.pid
            case events.Sight():
                self.state, self.generation = "running", event.generation
                for glance in event.ranks:
                    self._glance(event, glance)
            case events.Measured():
                self.total, self.epoch, self.samples = event.total or self.total, event.epoch, event.samples
                for name, value in event.values.items():
                    if value is not None:
                        self.curves.setdefault(name, Curve()).add(event.step, event.time, value)
            case events.Fault():
                self._tell(event.time, "fault", f"rank {event.rank}: {event.reason}", (event.rank,))
            case events.Recovered():
                self._tell(event.time, "recovered", f"recovered in {event.seconds:.2f} s", seconds=event.seconds)
            case events.Verdict():
                self._tell(event.time, "verdict", event.text, event.ranks)
                self.verdicts.append(self.happenings[-1])
            case events.Resumed():
                self._tell(event.time, "resumed", f"goes on after {event.seconds:.0f} s", seconds=event.seconds)
                self.verdicts.clear()
            case events.RunEnded():
                self.ended, self.code = event.time, event.code
                self.state = "failed" if event.code else "done"

    def _glance(self, event: events.Sight, glance: events.Glance) -> None:
        view = self.ranks.setdefault(glance.rank, RankView(glance.rank))
        view.rate = max(0.0, (glance.step - view.step) / event.seconds) if view.step >= 0 and event.seconds else 0.0
        view.step, view.samples = glance.step, glance.samples
        view.data, view.compute, view.waiting = glance.data, glance.compute, glance.waiting
        view.cpu, view.memory, view.gpu, view.gpu_memory = glance.cpu, glance.memory, glance.gpu, glance.gpu_memory
        view.silent, view.place = glance.silent, glance.place
        view.health = "dead" if glance.state == "X" else "well"
        view.strip.add(event.time, glance.phases)
        self.step = max(self.step, glance.step)

    def _tell(self, when: float, kind: str, text: str, ranks: tuple[int, ...] = (), seconds: float = 0.0) -> None:
        self.happenings.append(Happening(when, kind, text, ranks, seconds))
