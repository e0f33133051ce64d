"""One measurement of `phalanx bench scale`: nodes join, work, die one after the other, and stall once."""

from __future__ import annotations

import hashlib
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.common.processes import ProcessLostError, cpu_seconds
from benchmarks.scale.leader import STALL_TIMEOUT, MeasuredLeader, descriptors, folder_size, memory
from benchmarks.scale.nodes import Request
from benchmarks.scale.page import PageReader
from benchmarks.scale.simulator import Simulator
from phalanx.cluster.software import versions
from phalanx.launcher.coordination import port

LINES = 1000  # of output per second, of all ranks
DEATHS_EVERY = 10.0  # seconds
_PER_PROCESS = 2048  # simulated nodes
_JOIN_TIMEOUT = 300.0
_REGROUP_TIMEOUT = 60.0
_STALL_TIMEOUT = 120.0
_SETTLES = 5.0  # seconds after a death that do not count as steady


@dataclass(frozen=True)
class Second:
    """The leader in one second."""

    at: float  # seconds since all nodes have their first assignment
    cores: float
    memory: int  # bytes
    steady: bool  # no node has died just now
    descriptors: int = 0


@dataclass(frozen=True)
class ScaleSample:
    """The cost of one run of simulated nodes for its leader. A failed one has a reason."""

    nodes: int
    ranks: int
    join: float = 0.0  # seconds from the first connection until all nodes have their ranks
    seconds: tuple[Second, ...] = ()
    regroups: tuple[float, ...] = ()  # seconds from each death until all nodes have their new ranks
    pages: Mapping[str, Sequence[float]] = field(default_factory=dict)  # seconds from events to the page, by kind
    verdict: float = 0.0  # seconds from the end of --stall-timeout until the page shows the verdict
    stall_memory: int = 0  # bytes: the maximum of the leader during the stall
    folder: int = 0  # bytes of the run folder at the end
    simulator_cores: float = 0.0
    late: float = 0.0  # seconds: the maximum delay of the simulator's telemetry
    lost: tuple[str, ...] = ()  # nodes that the leader has dropped, with the reason
    failure: str = ""

    @property
    def steady_cores(self) -> float:
        """Return the median of the CPU cores of the leader in steady seconds."""
        steady = [second.cores for second in self.seconds if second.steady]
        return statistics.median(steady) if steady else 0.0

    @property
    def mean_cores(self) -> float:
        """Return the mean of the CPU cores of the leader, deaths included."""
        return statistics.fmean(second.cores for second in self.seconds) if self.seconds else 0.0

    @property
    def peak_memory(self) -> int:
        """Return the maximum memory of the leader, without the stall."""
        return max((second.memory for second in self.seconds), default=0)

    @property
    def growth(self) -> int | None:
        """Return by how many bytes the leader has grown from the second to the last quarter. None: too short."""
        return self._growth([second.memory for second in self.seconds])

    @property
    def descriptor_growth(self) -> int | None:
        """Return the same for open descriptors. Nodes that die close theirs."""
        return self._growth([second.descriptors for second in self.seconds])

    def _growth(self, values: Sequence[int]) -> int | None:
        quarter = len(values) // 4
        if quarter < 5:
            return None
        return round(statistics.median(values[-quarter:]) - statistics.median(values[quarter : 2 * quarter]))


def measure(
    nodes: int, slots: int, seconds: float, inherited: Mapping[str, str], note: Callable[[str], None]
) -> ScaleSample:
    """Let `nodes` nodes with `slots` ranks each work for `seconds`, and stall once. Node 0 is real."""
    with tempfile.TemporaryDirectory(prefix="bench-scale-") as folder:
        measurement = _Measurement(nodes, slots, folder, inherited, note)
        try:
            return measurement.run(seconds)
        except ProcessLostError as error:
            return measurement.failed(str(error))


class _Measurement:
    def __init__(
        self, nodes: int, slots: int, folder: str, inherited: Mapping[str, str], note: Callable[[str], None]
    ) -> None:
        self._nodes = nodes
        self._slots = slots
        self._folder = folder
        self._inherited = inherited
        self._note = note
        self._seconds: list[Second] = []
        self._regroups: list[float] = []
        self._began = 0.0

    def run(self, seconds: float) -> ScaleSample:
        token = secrets.token_hex(32)
        with MeasuredLeader(self._nodes, self._slots, token, self._inherited, self._folder) as leader:
            page = PageReader(*leader.page())
            try:
                begin = time.monotonic()
                with Simulator(self._requests(leader.port, token), self._inherited) as simulator:
                    simulator.collect("joined", _JOIN_TIMEOUT, leader.check)
                    started = simulator.collect("generation", _JOIN_TIMEOUT, leader.check)
                    join = max(report["at"] for report in started) - begin
                    self._note(f"{self._nodes} nodes have their ranks after {join:.1f} s")
                    self._work(seconds, leader, simulator)
                    verdict, stall_memory = self._stall(leader, simulator, page)
                    simulator.order(do="end")
                    ended = simulator.collect("cpu", 60.0, leader.check)
                    elapsed = time.monotonic() - begin
                    size = folder_size(leader.run_folder())
                    code = leader.end()
                    if code != 130:
                        raise ProcessLostError(f"the leader ended with code {code}, 130 was expected")
            finally:
                page.close()
        return ScaleSample(
            self._nodes,
            self._nodes * self._slots,
            join=join,
            seconds=tuple(self._seconds),
            regroups=tuple(self._regroups),
            pages=page.latency,
            verdict=verdict,
            stall_memory=stall_memory,
            folder=size,
            simulator_cores=sum(report["cpu"] for report in ended) / elapsed,
            late=max(report["late"] for report in ended),
            lost=tuple(simulator.lost),
        )

    def failed(self, why: str) -> ScaleSample:
        """Return the measurements before a failure."""
        seconds, regroups = tuple(self._seconds), tuple(self._regroups)
        return ScaleSample(self._nodes, self._nodes * self._slots, seconds=seconds, regroups=regroups, failure=why)

    def _requests(self, leader_port: int, token: str) -> list[Request]:
        with port.listen("127.0.0.1", 0) as free:
            closed = int(free.getsockname()[1])
        simulated = self._nodes - 1
        count = max(2 if simulated > 256 else 1, -(-simulated // _PER_PROCESS))
        return [
            Request(
                port=leader_port,
                token=token,
                nodes=list(range(1 + turn, self._nodes, count)),
                slots=self._slots,
                lines=LINES / count,
                versions=versions(),
                terms={"arguments": hashlib.sha256(b"").hexdigest()[:16]},  # the script has none
                failover_port=closed,
            )
            for turn in range(count)
        ]

    # -- phases

    def _work(self, seconds: float, leader: MeasuredLeader, simulator: Simulator) -> None:
        """Measure the leader every second, while one node dies every 10 s."""
        begin = self._began = time.monotonic()
        cpu, at, settled, generation = cpu_seconds(leader.pid), begin, begin, 0
        death, victim = begin + min(DEATHS_EVERY, seconds / 2), self._nodes // 2
        while time.monotonic() - begin < seconds:
            time.sleep(max(0.0, at + 1.0 - time.monotonic()))
            leader.check()
            now, used = time.monotonic(), cpu_seconds(leader.pid)
            steady = at - settled >= _SETTLES or not self._regroups
            cores = (used - cpu) / (now - at)
            self._seconds.append(Second(now - begin, cores, memory(leader.pid), steady, descriptors(leader.pid)))
            cpu, at = used, now
            if now >= death and victim < self._nodes:
                generation += 1
                self._regroups.append(self._kill(victim, generation, leader, simulator))
                settled, death, victim = time.monotonic(), now + DEATHS_EVERY, victim + 1
                at, cpu = settled, cpu_seconds(leader.pid)

    def _kill(self, victim: int, generation: int, leader: MeasuredLeader, simulator: Simulator) -> float:
        """Let a node die; return the seconds until all others have their new ranks."""
        simulator.order(do="kill", node=victim)
        killed = simulator.first("killed", _REGROUP_TIMEOUT, leader.check)["at"]
        reports = simulator.collect("generation", _REGROUP_TIMEOUT, leader.check, value=generation)
        took: float = max(report["at"] for report in reports) - killed
        self._note(f"node {victim} died: {took:.2f} s until all others have their new ranks")
        return took

    def _stall(self, leader: MeasuredLeader, simulator: Simulator, page: PageReader) -> tuple[float, int]:
        """Let all ranks wait for one; return how long the verdict took, and the maximum memory of the leader."""
        begin, most = time.monotonic(), 0
        simulator.order(do="stall", ranks=[self._nodes * self._slots // 3])
        while "verdict" not in page.latency:
            leader.check()
            most = max(most, memory(leader.pid))
            if time.monotonic() - begin > _STALL_TIMEOUT:
                raise ProcessLostError(f"no verdict about a stall in {_STALL_TIMEOUT:.0f} s")
            time.sleep(0.1)
        took = time.monotonic() - begin - STALL_TIMEOUT
        self._note(f"a stall: the verdict was on the page {took:.1f} s after --stall-timeout")
        simulator.order(do="resume")
        return took, most
