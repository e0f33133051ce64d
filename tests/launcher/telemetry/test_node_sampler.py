"""One poller per node: every worker is read once per tick, and the leader gets one message per second."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.control import messages
from phalanx.diagnose.evidence import Gpu
from phalanx.launcher.ipc.node_rpc import NodeRpc
from phalanx.launcher.telemetry import node_sampler
from phalanx.launcher.telemetry.node_sampler import NodeReading, NodeSampler
from phalanx.launcher.telemetry.step_timings import RankTiming
from phalanx.launcher.workers.worker import Worker
from tests.control.parties import until
from tests.kit.placements import seat
from tests.launcher.telemetry.test_step_timings import reading


class Links:
    leads = False
    skew = 0.0

    def __init__(self) -> None:
        self.sent: list[messages.RpcFrame] = []

    def members(self) -> dict[int, tuple[int, ...]]:
        return {1: (1,)} if self.leads else {}

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


class Probe:
    def __init__(self) -> None:
        self.reads = 0

    @property
    def status(self) -> object:
        self.reads += 1
        return reading(3, 30)


class Recorder:
    def __init__(self, section: str) -> None:
        self.section = section
        self.readings: list[NodeReading] = []
        self.received: list[tuple[int, bytes]] = []

    def observe(self, reading: NodeReading) -> object | None:
        self.readings.append(reading)
        return {"count": len(self.readings)}

    def receive(self, member: int, content: bytes) -> None:
        self.received.append((member, content))


class Broken(Recorder):
    def observe(self, reading: NodeReading) -> object | None:
        raise RuntimeError("a bug")

    def receive(self, member: int, content: bytes) -> None:
        raise RuntimeError("a bug")


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = SimpleNamespace(now=50.0, probe=Probe(), links=Links())
    clock = SimpleNamespace(monotonic=lambda: found.now, time=lambda: found.now + 1000)
    monkeypatch.setattr(node_sampler, "time", clock)
    worker = Worker(seat(), "", pid=os.getpid(), probe=found.probe)
    spare = Worker(seat(1, local_rank=0), "", pid=os.getpid(), probe=found.probe)
    spare.spare = True
    found.attempt = SimpleNamespace(workers={"0": worker, "1": spare}, living=[("0", worker), ("1", spare)])
    found.group = SimpleNamespace(node_rank=0, node_count=2)
    found.agent = SimpleNamespace(attempt=found.attempt, plan=SimpleNamespace(group=found.group))
    return found


def sampler(node: Any, *consumers: Any) -> NodeSampler:
    made = NodeSampler(node.agent, node.links, NodeRpc(node.links))
    made.start(*consumers)
    assert made._task is not None
    made._task.cancel()
    return made


def test_a_worker_is_read_once_per_tick_and_sent_once_per_second(node: Any) -> None:
    one, other = Recorder("one"), Recorder("other")

    async def scenario() -> None:
        made = sampler(node, one, other)
        for _ in range(4):
            made.sample()
            node.now += 0.5

    asyncio.run(scenario())
    assert node.probe.reads == 4
    assert one.readings == other.readings
    assert [len(each.workers) for each in one.readings] == [1] * 4
    assert [each.due for each in one.readings] == [True, False, True, False]
    assert [frame.kind for frame in node.links.sent] == ["telemetry"] * 2
    assert node.links.sent[1].content == b'{"one":{"count":3},"other":{"count":3}}'


@pytest.mark.parametrize(("nodes", "seconds"), [(1, 1), (1024, 1), (1025, 2), (4096, 4), (1 << 14, 5)])
def test_a_leader_of_more_nodes_gets_messages_less_often(nodes: int, seconds: int) -> None:
    assert node_sampler.period(nodes) == seconds


def test_many_nodes_take_turns_within_a_period() -> None:
    assert [node_sampler.turn(node, 1024) for node in (0, 1023)] == [0.0, 0.0]
    turns = [node_sampler.turn(node, 4096) for node in range(4096)]
    assert turns == sorted(set(turns))
    assert (turns[0], turns[-1]) == (0.0, pytest.approx(3.0, abs=1e-3))


def test_each_of_many_nodes_sends_in_its_turn_what_all_have_sampled_at_once(node: Any) -> None:
    one = Recorder("one")
    node.now, node.group.node_rank, node.group.node_count = 52.0, 6, 4096

    async def scenario() -> None:
        made = sampler(node, one)
        for _ in range(9):
            made.sample()
            node.now += 0.5
            assert node.links.sent == []  # its turn comes after the first sample
            if node.now == 54.0:
                await until(lambda: node.links.sent)
                assert node.links.sent.pop().content == b'{"one":{"count":1}}'
        node.now -= 0.3
        made.concluded()

    asyncio.run(scenario())
    due = [each for each in one.readings if each.due]
    assert [each.now for each in due] == [52.0, 56.0, 56.2]
    assert [each.tick for each in due] == [10520, 10560, 10562]
    # The end of an attempt is sent at once, after what was waiting.
    assert [frame.content for frame in node.links.sent] == [b'{"one":{"count":9}}', b'{"one":{"count":10}}']


def test_a_consumer_that_fails_does_not_affect_the_others(node: Any) -> None:
    broken, sound = Broken("broken"), Recorder("sound")

    async def scenario() -> None:
        made = sampler(node, broken, sound)
        made.sample()
        assert [frame.content for frame in node.links.sent] == [b'{"sound":{"count":1}}']
        node.links.leads = True
        for content in (b"[", b'{"broken":1,"sound":[2],"unknown":3}'):
            made._rpc.receive(1, messages.RpcFrame(kind="telemetry", number=0, content=content))

    asyncio.run(scenario())
    assert sound.received == [(1, b"[2]")]


def test_the_last_reading_is_sent_and_slots_are_not_read_after_it(node: Any) -> None:
    one = Recorder("one")

    async def scenario() -> None:
        made = sampler(node, one)
        made.sample()
        node.now += 0.2
        made.concluded()
        node.now += 0.5
        made.sample()

    asyncio.run(scenario())
    assert [each.last for each in one.readings] == [False, True, False]
    assert [each.tick for each in one.readings] == [10500, 10502, 10500]
    assert [each.workers[0].status is None for each in one.readings] == [False, False, True]
    assert len(node.links.sent) == 2


def test_every_answer_of_the_driver_counts_once() -> None:
    timing = RankTiming()
    slow, same = Gpu(index=0, use=1.0, throttled="thermal"), Gpu(index=0, use=1.0)
    for gpu in (None, slow, slow, slow, same, same):
        timing.update(reading(3, 30), gpu)
    assert (timing.gpu_readings, timing.slowdowns["thermal"]) == (2, 1)
