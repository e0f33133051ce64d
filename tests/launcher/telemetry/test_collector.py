"""The collector combines the samples of all nodes and writes them to the run folder."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.cluster import links
from phalanx.contract import encoding, events
from phalanx.contract.events import LinkMeasured, NodeRanks, RankInfo, RankSample
from phalanx.contract.messages import worker_messages
from phalanx.control import messages
from phalanx.forkserver.board import status_slot
from phalanx.forkserver.board.status_slot import PHASES
from phalanx.launcher.ipc.node_rpc import NodeRpc
from phalanx.launcher.runs.run_folder import RunFolder
from phalanx.launcher.telemetry import collector, metrics, node_sampler
from phalanx.launcher.telemetry.collector import Collector, NodeSamples
from phalanx.launcher.telemetry.node_sampler import NodeSampler
from phalanx.launcher.workers.probes import ProbeClient, StatusBoard
from phalanx.launcher.workers.worker import Worker
from tests.kit.placements import seat
from tests.launcher.telemetry.looks import WALL


class Workers(dict[str, Any]):
    debugged: frozenset[int] = frozenset()


class FakeLinks:
    """The links of one of three nodes, which leads or follows."""

    leads = True
    skew = 0.0

    def __init__(self) -> None:
        self.ranks = {1: (1,), 2: (2,)}
        self.sent: list[messages.RpcFrame] = []

    def members(self) -> dict[int, tuple[int, ...]]:
        return self.ranks

    def backlog(self, to: int | None) -> int:
        return 0

    def send_rpc(self, frame: messages.RpcFrame, to: int | None) -> None:
        self.sent.append(frame)

    def address(self, member: int) -> str:
        return ""

    def on_trial(self) -> frozenset[int]:
        return frozenset()

    def dismiss(self, ranks: Sequence[int], why: str) -> bool:
        return False


class SampledAgent:
    """An agent with one rank and a clock that the test sets."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 50.0
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now + WALL)
        for module in (collector, metrics, node_sampler):
            monkeypatch.setattr(module, "time", clock)
        self.board = StatusBoard()
        slot = self.board.allocate()
        assert slot is not None
        self.probe = ProbeClient(self.board, slot, lambda *_: None)
        self.page = status_slot.StatusSlot(self.board.memory, slot)
        self.worker = Worker(seat(), str(folder), pid=os.getpid(), probe=self.probe)
        self.attempt = SimpleNamespace(workers=Workers({"0": self.worker}), living=[], measured=None, generation=3)
        plan = SimpleNamespace(
            seats=[self.worker.seat],
            group=SimpleNamespace(spare=False, node_rank=0, node_count=3),
            environ={"PHALANX_HOME": str(folder)},
        )
        self.links = FakeLinks()
        self.rpc = NodeRpc(self.links)
        self.folder = RunFolder(str(folder))
        self.recorded: list[events.AnyEvent] = []
        self.folder.listeners.append(lambda line: self.recorded.append(events.decode(line)))
        self.plan = plan
        agent: Any = SimpleNamespace(attempt=self.attempt, plan=plan)
        self.collector = Collector(agent, self.links, self.rpc, self.folder)
        self.sampler = NodeSampler(agent, self.links, self.rpc)
        self.sampler.start(self.collector)
        assert self.sampler._task is not None
        self.sampler._task.cancel()  # replaced by `second`

    def second(self, phase: str = "forward") -> None:
        """Write a second of looks, and sample them."""
        for tenth in range(10):
            number = int(self.now * 10) + tenth
            self.page.look(number * 100_000_000 + 20_000_000, number, 0, PHASES.index(phase), 1)
        self.now += 1
        self.sampler.sample()

    def other(self, rank: int, tick: int, **sample: Any) -> None:
        """Receive the sample of another node."""
        seen = NodeSamples(
            tick=tick,
            seconds=1.0,
            infos=NodeRanks(node=rank, host=f"host{rank}", ranks=(RankInfo(rank=rank),)),
            ranks=(RankSample(rank=rank, **sample),),
        )
        content = encoding.encode({"samples": seen})
        self.rpc.receive(rank, messages.RpcFrame(kind="telemetry", number=0, content=content))

    def of(self, kind: Any) -> list[Any]:
        return [event for event in self.recorded if isinstance(event, kind)]

    def close(self) -> None:
        self.probe.close()
        del self.page  # it holds the memory
        self.board.close()
        self.folder.close()


RunAgent = Callable[[Callable[[SampledAgent], Coroutine[Any, Any, None]]], None]


@pytest.fixture
def run_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunAgent:
    async def run(act: Callable[[SampledAgent], Coroutine[Any, Any, None]]) -> None:
        scene = SampledAgent(tmp_path, monkeypatch)
        try:
            await act(scene)
        finally:
            scene.close()

    return lambda act: asyncio.run(run(act))


def test_the_leader_waits_for_the_samples_of_other_nodes(run_agent: RunAgent, tmp_path: Path) -> None:
    links.keep(str(tmp_path), [LinkMeasured(one="host1", other="host2", latency=1e-5, there=1e9, back=2e9)], 7.0)
    run_agent(_together)


async def _together(scene: SampledAgent) -> None:
    scene.second()
    (alone,) = scene.of(events.ClusterSample)  # no other node has sent anything yet
    assert (alone.time, alone.seconds, alone.generation) == (1051.0, 1.0, 3)
    assert [sample.phases for sample in alone.ranks] == ["f" * 10]
    for rank in (1, 2):
        scene.other(rank, 10510, phases="w" * 10, samples=10.0)
    scene.second("data")
    assert len(scene.of(events.ClusterSample)) == 1
    scene.other(2, 10520, phases="b" * 10, state="R", step=7)
    assert len(scene.of(events.ClusterSample)) == 1
    scene.other(1, 10520, phases="w" * 10)
    together = scene.of(events.ClusterSample)[1]
    assert together.time == 1052.0
    assert [(sample.rank, sample.phases) for sample in together.ranks] == [(0, "d" * 10), (1, "w" * 10), (2, "b" * 10)]
    assert together.ranks[0].data == 1.0
    assert together.ranks[0].memory > 1 << 20
    infos = scene.of(events.RankInfos)
    assert [len(list(event.each())) for event in infos] == [1, 3]
    # One is a second late: the sample of the other is not lost.
    scene.second()
    scene.other(1, 10530, phases="k" * 10)
    scene.other(1, 10540, phases="b" * 10)
    assert [sample.phases for sample in scene.of(events.ClusterSample)[-1].ranks] == ["f" * 10, "k" * 10, ""]
    scene.second()
    scene.other(2, 10540, phases="b" * 10, state="R", step=7)
    assert [sample.phases for sample in scene.of(events.ClusterSample)[-1].ranks] == ["f" * 10, "b" * 10, "b" * 10]
    # One is silent: the collector waits for its sample as long as it can arrive, and no longer.
    for _ in range(5):
        scene.second()
        scene.other(1, int(scene.now + WALL) * 10, phases="w" * 10)
    found = scene.of(events.ClusterSample)[4:]
    assert [event.time for event in found] == [1055.0, 1056.0, 1057.0, 1058.0, 1059.0]
    last = found[-1].ranks[2]
    assert (last.state, last.step, last.phases) == ("R", 7, "")
    assert last.silent >= 4.0
    # The node is lost, with its rank.
    scene.links.ranks = {1: (1,)}
    scene.second()
    scene.other(1, int(scene.now + WALL) * 10, phases="w" * 10)
    assert [len(list(event.each())) for event in scene.of(events.RankInfos)] == [1, 3, 2]
    scene.links.ranks = {1: (5,)}  # another node now has another rank, and has not sent its sample yet
    scene.second()
    scene.second()
    assert [sample.rank for sample in scene.of(events.ClusterSample)[-1].ranks] == [0]
    await asyncio.wait_for(asyncio.gather(*scene.collector._tasks), 10)
    (known,) = scene.of(events.Links)
    assert (known.measured, known.pairs[0].there) == (7.0, 1e9)


def test_with_many_nodes_a_sample_covers_several_seconds(run_agent: RunAgent) -> None:
    run_agent(_many_nodes)


async def _many_nodes(scene: SampledAgent) -> None:
    scene.plan.group.node_count = 4096
    scene.now = 51.0

    def seconds(count: int) -> None:
        for _ in range(count):
            scene.second()

    seconds(1)
    for rank in (1, 2):
        scene.other(rank, 10520, phases="w" * 40)
    seconds(4)
    assert scene.now == 56.0
    scene.other(1, 10560, phases="b" * 40)
    seconds(3)  # the other node has its turn
    before = len(scene.of(events.ClusterSample))
    scene.other(2, 10560, phases="k" * 40)
    found = scene.of(events.ClusterSample)
    assert len(found) == before + 1
    assert (found[-1].time, found[-1].seconds) == (1056.0, 4.0)
    assert [sample.phases for sample in found[-1].ranks] == ["f" * 40, "b" * 40, "k" * 40]
    # One that misses a turn is not silent yet.
    for turn in range(4):
        seconds(4)
        scene.other(1, 10600 + 40 * turn, phases="b" * 40)
    seconds(1)
    silent = [event.ranks[2].silent for event in scene.of(events.ClusterSample)[before + 1 :]]
    assert silent[0] == 0.0
    assert silent[-1] > 12.0


def test_samples_of_a_node_with_a_wrong_clock_are_used(run_agent: RunAgent) -> None:
    run_agent(_wrong_clock)


async def _wrong_clock(scene: SampledAgent) -> None:
    scene.links.ranks = {1: (1,)}
    scene.other(1, 99999, phases="w" * 10)
    scene.second()
    scene.other(1, 99999, phases="b" * 10)
    assert scene.of(events.ClusterSample)[-1].ranks[1].phases == "b" * 10


def test_samples_of_the_previous_attempt_are_dropped(run_agent: RunAgent) -> None:
    run_agent(_again)


async def _again(scene: SampledAgent) -> None:
    scene.links.ranks = {1: (1,)}
    scene.other(1, 10510, state="X", step=7)
    scene.second()
    assert [sample.state for sample in scene.of(events.ClusterSample)[-1].ranks][1:] == ["X"]
    scene.sampler.concluded()
    scene.collector._agent.attempt = SimpleNamespace(**vars(scene.attempt))  # type: ignore[misc]
    scene.second()
    assert [sample.rank for sample in scene.of(events.ClusterSample)[-1].ranks] == [0]


def test_a_follower_sends_its_samples_and_collects_after_a_failover(run_agent: RunAgent) -> None:
    run_agent(_follow)


async def _follow(scene: SampledAgent) -> None:
    scene.links.leads, scene.links.skew = False, 5.0
    scene.second()
    assert scene.recorded == []
    (frame,) = scene.links.sent
    assert frame.kind == "telemetry"
    seen = collector._decoder.decode(node_sampler._sections.decode(frame.content)["samples"])
    assert seen.infos == NodeRanks(host=os.uname().nodename, ranks=(RankInfo(rank=0, pid=os.getpid()),))
    assert len(seen.ranks[0].phases) == 10
    scene.collector.measured(worker_messages.MeasuredStep(step=3, values={"loss": 0.5}))
    assert [sent.kind for sent in scene.links.sent] == ["telemetry", "measured"]
    scene.links.leads, scene.links.skew, scene.links.ranks = True, 0.0, {}
    scene.second()
    assert [event.time for event in scene.of(events.ClusterSample)] == [1052.0]
    assert len(scene.of(events.RankInfos)) == 1


def test_a_dead_rank_is_shown_until_it_is_replaced(run_agent: RunAgent) -> None:
    run_agent(_dead)


async def _dead(scene: SampledAgent) -> None:
    scene.links.ranks = {}
    for code, state in ((None, "R"), (-9, "X"), (0, "E")):
        scene.worker.code = code
        scene.second()
        (sample,) = scene.of(events.ClusterSample)[-1].ranks
        assert sample.state in (state, "S" if code is None else state)
    again = Worker(seat(), "", pid=os.getpid())
    scene.attempt.workers["1"] = again
    again.spare = True
    scene.second()
    assert scene.of(events.ClusterSample)[-1].ranks[0].state == "E"
    again.spare = False
    scene.second()
    (sample,) = scene.of(events.ClusterSample)[-1].ranks
    assert (sample.state, sample.phases) in (("R", "." * 10), ("S", "." * 10))


def test_printed_metrics_are_used_until_the_script_reports_its_own(run_agent: RunAgent) -> None:
    run_agent(_printed)


async def _read(scene: SampledAgent) -> None:
    scene.second()
    await asyncio.wait_for(scene.collector._metrics._task or asyncio.sleep(0), 10)


async def _printed(scene: SampledAgent) -> None:
    scene.links.ranks = {}
    log = Path(scene.worker.folder, "stdout.log")
    log.write_text("nothing\n" * 100_000 + "step 5/9 loss 0.25\n")
    await _read(scene)
    (recorded,) = scene.of(events.MetricsMeasured)
    assert (recorded.step, recorded.total, recorded.values, recorded.samples) == (5, 9, {"loss": 0.25}, -1.0)
    scene.page.step(70, 1)
    with log.open("a") as file:
        file.write("loss nan\n")
    await _read(scene)
    assert (scene.of(events.MetricsMeasured)[-1].step, scene.of(events.MetricsMeasured)[-1].values) == (
        70,
        {"loss": None},
    )
    await _read(scene)
    assert len(scene.of(events.MetricsMeasured)) == 2
    scene.attempt.measured = worker_messages.MeasuredStep(step=1)
    with log.open("a") as file:
        file.write("loss 7\n")
    await _read(scene)
    assert len(scene.of(events.MetricsMeasured)) == 2
    # Of several reports at once the last is kept, and what only earlier ones have, with its own step.
    for step in range(20):
        seldom = {"accuracy": 0.9} if step == 7 else {}
        scene.collector.measured(worker_messages.MeasuredStep(step=step, values={"loss": 1.0, **seldom}))
    scene.sampler.concluded()
    scene.second()  # nothing more of this attempt
    kept = [events.decode(text) for text in Path(scene.folder.path, "samples.jsonl").read_bytes().splitlines()]
    measured = [(event.step, event.values) for event in kept if isinstance(event, events.MetricsMeasured)]
    assert measured[2:] == [(0, {"loss": 1.0}), (7, {"accuracy": 0.9}), (19, {"loss": 1.0})]
    assert [event.step for event in scene.of(events.MetricsMeasured)][2:] == list(range(20))  # viewers get each once
    # What came before the agent watched its ranks has its own time.
    scene.collector.measured(worker_messages.MeasuredStep(step=20, received=7.25))
    assert scene.of(events.MetricsMeasured)[-1].time == 7.25
    assert len([event for event in kept if isinstance(event, events.ClusterSample)]) == len(
        scene.of(events.ClusterSample)
    )


def test_a_log_that_cannot_be_opened_does_not_block_sampling(run_agent: RunAgent, tmp_path: Path) -> None:
    log, ends = tmp_path / "stdout.log", []
    os.mkfifo(log)  # opening it blocks until there is a writer

    async def act(scene: SampledAgent) -> None:
        scene.links.ranks = {}
        for _ in range(3):
            scene.second()
            await asyncio.sleep(0.01)
        scene.sampler.concluded()
        assert len(scene.of(events.ClusterSample)) == 4
        await scene.sampler.end()
        await scene.collector.end()
        ends.append(os.open(log, os.O_RDWR))

    run_agent(act)
    os.close(ends[0])
