"""What there is to be seen of every rank: letters of its time, from its page to the file of the run."""

from __future__ import annotations

import asyncio
import itertools
import os
import stat
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.cluster import links
from phalanx.contract import encoding, events, worker_messages
from phalanx.contract.events import UNSEEN, LinkMeasured, RankInfo, RankSample
from phalanx.control import messages
from phalanx.forkserver.probe import status_slot
from phalanx.forkserver.probe.status_slot import PHASES, SlotLook
from phalanx.launcher.ipc.node_rpc import NodeRpc
from phalanx.launcher.runs.run_folder import RunFolder
from phalanx.launcher.telemetry import collector, metrics, node_sampler, rank_samples
from phalanx.launcher.telemetry.collector import Collector, NodeSamples
from phalanx.launcher.telemetry.metrics import Downsampler
from phalanx.launcher.telemetry.node_sampler import NodeSampler
from phalanx.launcher.workers.probes import ProbeClient, StatusBoard
from phalanx.launcher.workers.worker import Worker
from tests.kit.placements import seat

WALL = 1000.0  # seconds that the clock on the wall is ahead of the other


def look(tenths: float, phase: str, step: int = 0) -> SlotLook:
    return SlotLook((tenths + 0.05) / 10, PHASES.index(phase), step)


# -- the page


def test_the_page_remembers_the_last_looks() -> None:
    memory = memoryview(bytearray(2 * status_slot.SIZE))
    own = status_slot.StatusSlot(memory, 1)
    assert status_slot.looks(memory, 1, 0.0) == []
    for number in range(1, 201):
        own.step((1 << 20) + number // 10, 1)  # more than is written of it
        own.look(number * 100_000_000, number, 0, number % len(PHASES), number)
    found = status_slot.looks(memory, 1, 0.0)
    assert len(found) == status_slot.RING
    assert found[-1] == SlotLook(20.0, 200 % len(PHASES), (1 << 20) + 20)
    assert found[0] == SlotLook(13.7, 137 % len(PHASES), (1 << 20) + 13)
    assert [one.time for one in status_slot.looks(memory, 1, 19.8)] == [19.9, 20.0]
    assert status_slot.looks(memory, 0, 0.0) == []
    assert status_slot.read(memory, 1).phases["idle"] == max(
        n for n in range(201) if n % len(PHASES) == PHASES.index("idle")
    )


def test_looks_are_never_read_half_written() -> None:
    """By another process than the one that writes them."""
    board = StatusBoard()
    slot = board.allocate()
    assert slot is not None
    child = os.fork()
    if not child:
        own, now = status_slot.StatusSlot(board.memory, slot), 0
        while True:
            now += 255_000_000
            own.step(now, now)
            own.look(now, now // 255_000_000, 0, now % 10, 1)
    try:
        seen: list[SlotLook] = []
        while len(seen) < 20_000:
            seen += status_slot.looks(board.memory, slot, 0.0)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        board.close()
    assert {round(one.time * 1000) % 255 for one in seen} == {0}


# -- letters


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        ([], "....."),
        ([look(0, "data"), look(1, "forward"), look(2, "backward"), look(3, "collective"), look(4, "idle")], "dfbwn"),
        ([look(0.2, "data"), look(1.4, "forward"), look(3.1, "backward")], "dffbb"),  # a little late
        ([look(0, "data"), look(4.9, "forward")], "ddd.f"),  # too late
        ([look(1, "data", 3), look(2, "optimizer", 4), look(3, "data", 4), look(4, "data", 6)], ".dOdD"),
        ([look(1, "optimizer", 3), look(1.5, "optimizer", 4), look(1.9, "data", 4)], ".Dddd"),
    ],
    ids=range(6),
)
def test_a_letter_for_every_tenth_of_a_second(looks: list[SlotLook], expected: str) -> None:
    first = int(WALL * 10)
    assert rank_samples.letters(looks, first, first + 5, WALL) == expected


def test_a_second_goes_on_where_the_one_before_ended() -> None:
    looks = [look(tenths + 0.3, PHASES[tenths % 7 + 2], tenths // 3) for tenths in range(40)]
    whole = rank_samples.letters(looks, 0, 40, 0.0)
    parts, before = "", None
    for second in range(4):
        now = [one for one in looks if second <= one.time < second + 1]
        parts += rank_samples.letters(now, second * 10, second * 10 + 10, 0.0, before)
        before = now[-1]
    assert parts == whole
    assert UNSEEN not in whole
    assert sum(letter.isupper() for letter in whole) == 13


def test_shares_are_of_what_was_seen() -> None:
    assert rank_samples.shares([]) == (0.0, 0.0, 0.0)
    seen = ["data", "forward", "backward", "idle", "collective", "join", "compile", "checkpoint", "data", "optimizer"]
    assert rank_samples.shares([look(0, phase) for phase in seen]) == (0.2, 0.4, 0.2)


def test_a_rank_that_sleeps_does_not_compute() -> None:
    assert rank_samples.shares([look(0, phase) for phase in ("sleep", "sleep", "sleep", "idle")]) == (0.0, 0.25, 0.0)
    own = [look(0, phase) for phase in ("forward", "idle", "idle", "idle", "data")]
    assert rank_samples.shares(own, 0.5) == (0.2, 0.3, 0.0)  # it sleeps for milliseconds, in between
    assert rank_samples.shares(own, 3.0) == (0.2, 0.8, 0.0)


def test_samples_a_second_are_those_of_the_last_seconds() -> None:
    worker, seen = Worker(seat(), ""), rank_samples._WorkerHistory()
    assert seen.rate(worker) == -1
    found = []
    for second in range(20):
        worker.progress.samples, worker.progress.sampled = 100 * second + 50 * max(0, second - 10), float(second)
        found.append(seen.rate(worker))
    assert found[:11] == [-1.0, *[100.0] * 10]
    assert found[-1] == 150.0
    worker.progress.samples, worker.progress.sampled = 10, 20.5  # it has begun anew
    assert seen.rate(worker) == -1


def test_steps_are_as_new_as_the_page() -> None:
    worker, seen = Worker(seat(), ""), rank_samples._WorkerHistory()
    assert [seen.steps(worker, paged) for paged in (0, 7)] == [-1, 7]
    worker.progress.step, worker.progress.slot_step, worker.progress.steps_match = 1000, 100, True
    assert seen.steps(worker, 103) == 1003
    worker.progress.step, worker.progress.slot_step, worker.progress.steps_match = 0, 103, False  # its group forms anew
    assert seen.steps(worker, 103) == 1003
    worker.progress.step = 1000
    assert seen.steps(worker, 106) == 1000  # it makes two of them for one that it commits


# -- what is kept


def test_a_run_that_never_ends_fills_no_disk() -> None:
    room = 1 << 18  # a day or two of this are a month of what there is
    downsampler, kept = Downsampler(room, 1.0), []
    for second in range(2 * 86400):
        if downsampler.keeps(second + 0.01 * (second % 3)):
            downsampler.written += 4096
            kept.append(second)
    assert downsampler.written < 12 * room
    assert kept[:64] == list(range(64))
    gaps = [after - before for before, after in itertools.pairwise(kept)]
    assert gaps == sorted(gaps)
    assert gaps[-1] == 2048
    assert not downsampler.keeps(second)
    assert downsampler.keeps(second, always=True)


# -- all nodes together


class Coordinator:
    """Of three nodes; this one leads, or follows."""

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

    def dismiss(self, ranks: Sequence[int], why: str) -> bool:
        return False


class Scene:
    """An agent with one rank, whose clock is in our hands."""

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
        self.attempt = SimpleNamespace(
            workers={"0": self.worker}, living=[], debugged=frozenset(), measured=None, generation=3
        )
        plan = SimpleNamespace(
            seats=[self.worker.seat],
            group=SimpleNamespace(spare=False, node_rank=0),
            environ={"PHALANX_HOME": str(folder)},
        )
        self.coordinator = Coordinator()
        self.rpc = NodeRpc(self.coordinator)
        self.folder = RunFolder(str(folder))
        self.told: list[events.AnyEvent] = []
        self.folder.listeners.append(lambda line: self.told.append(events.decode(line)))
        agent: Any = SimpleNamespace(attempt=self.attempt, plan=plan)
        self.collector = Collector(agent, self.coordinator, self.rpc, self.folder)
        self.sampler = NodeSampler(agent, self.coordinator, self.rpc)
        self.sampler.start(self.collector)
        assert self.sampler._task is not None
        self.sampler._task.cancel()  # `second` takes its place

    def second(self, phase: str = "forward") -> None:
        """Of looks; and then it looks at them."""
        for tenth in range(10):
            number = int(self.now * 10) + tenth
            self.page.look(number * 100_000_000 + 20_000_000, number, 0, PHASES.index(phase), 1)
        self.now += 1
        self.sampler.sample()

    def other(self, rank: int, tick: int, **sample: Any) -> None:
        """A node tells."""
        seen = NodeSamples(
            tick=tick,
            seconds=1.0,
            infos=(RankInfo(rank=rank, node=rank, host=f"host{rank}"),),
            ranks=(RankSample(rank=rank, **sample),),
        )
        content = encoding.encode({"samples": seen})
        self.rpc.receive(rank, messages.RpcFrame(kind="telemetry", number=0, content=content))

    def of(self, kind: Any) -> list[Any]:
        return [event for event in self.told if isinstance(event, kind)]

    def close(self) -> None:
        self.probe.close()
        del self.page  # it holds the memory
        self.board.close()
        self.folder.close()


Play = Callable[[Callable[[Scene], Coroutine[Any, Any, None]]], None]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    async def played(act: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
        scene = Scene(tmp_path, monkeypatch)
        try:
            await act(scene)
        finally:
            scene.close()

    return lambda act: asyncio.run(played(act))


def test_node_0_waits_a_moment_for_the_others_and_puts_all_together(play: Play, tmp_path: Path) -> None:
    links.keep(str(tmp_path), [LinkMeasured(one="host1", other="host2", latency=1e-5, there=1e9, back=2e9)], 7.0)
    play(_together)


async def _together(scene: Scene) -> None:
    scene.second()
    (alone,) = scene.of(events.ClusterSample)  # nobody else has told anything yet
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
    faces = scene.of(events.RankInfos)
    assert [len(event.ranks) for event in faces] == [1, 3]
    # One is a second late: what the other has told is not lost.
    scene.second()
    scene.other(1, 10530, phases="k" * 10)
    scene.other(1, 10540, phases="b" * 10)
    assert [sample.phases for sample in scene.of(events.ClusterSample)[-1].ranks] == ["f" * 10, "k" * 10, ""]
    scene.second()
    scene.other(2, 10540, phases="b" * 10, state="R", step=7)
    assert [sample.phases for sample in scene.of(events.ClusterSample)[-1].ranks] == ["f" * 10, "b" * 10, "b" * 10]
    # One is silent: it is waited for as long as it may come, and no longer.
    for _ in range(5):
        scene.second()
        scene.other(1, int(scene.now + WALL) * 10, phases="w" * 10)
    found = scene.of(events.ClusterSample)[4:]
    assert [event.time for event in found] == [1055.0, 1056.0, 1057.0, 1058.0, 1059.0]
    last = found[-1].ranks[2]
    assert (last.state, last.step, last.phases) == ("R", 7, "")
    assert last.silent >= 4.0
    # It is lost, and its rank with it.
    scene.coordinator.ranks = {1: (1,)}
    scene.second()
    scene.other(1, int(scene.now + WALL) * 10, phases="w" * 10)
    assert [len(event.ranks) for event in scene.of(events.RankInfos)] == [1, 3, 2]
    scene.coordinator.ranks = {1: (5,)}  # and another has another rank now, which it has not told of yet
    scene.second()
    scene.second()
    assert [sample.rank for sample in scene.of(events.ClusterSample)[-1].ranks] == [0]
    await asyncio.wait_for(asyncio.gather(*scene.collector._tasks), 10)
    (known,) = scene.of(events.Links)
    assert (known.measured, known.pairs[0].there) == (7.0, 1e9)


def test_a_node_whose_clock_is_wrong_is_seen_when_it_tells(play: Play) -> None:
    play(_wrong_clock)


async def _wrong_clock(scene: Scene) -> None:
    scene.coordinator.ranks = {1: (1,)}
    scene.other(1, 99999, phases="w" * 10)
    scene.second()
    scene.other(1, 99999, phases="b" * 10)
    assert scene.of(events.ClusterSample)[-1].ranks[1].phases == "b" * 10


def test_what_others_have_told_of_the_attempt_before_is_over(play: Play) -> None:
    play(_again)


async def _again(scene: Scene) -> None:
    scene.coordinator.ranks = {1: (1,)}
    scene.other(1, 10510, state="X", step=7)
    scene.second()
    assert [sample.state for sample in scene.of(events.ClusterSample)[-1].ranks][1:] == ["X"]
    scene.sampler.concluded()
    scene.collector._agent.attempt = SimpleNamespace(**vars(scene.attempt))  # type: ignore[misc]
    scene.second()
    assert [sample.rank for sample in scene.of(events.ClusterSample)[-1].ranks] == [0]


def test_who_follows_tells_who_leads_and_one_that_takes_over_goes_on(play: Play) -> None:
    play(_follow)


async def _follow(scene: Scene) -> None:
    scene.coordinator.leads, scene.coordinator.skew = False, 5.0
    scene.second()
    assert scene.told == []
    (letter,) = scene.coordinator.sent
    assert letter.kind == "telemetry"
    seen = collector._decoder.decode(node_sampler._sections.decode(letter.content)["samples"])
    assert seen.infos == (RankInfo(rank=0, host=os.uname().nodename, pid=os.getpid()),)
    assert len(seen.ranks[0].phases) == 10
    scene.collector.measured(worker_messages.MeasuredStep(step=3, values={"loss": 0.5}))
    assert [sent.kind for sent in scene.coordinator.sent] == ["telemetry", "measured"]
    scene.coordinator.leads, scene.coordinator.skew, scene.coordinator.ranks = True, 0.0, {}
    scene.second()
    assert [event.time for event in scene.of(events.ClusterSample)] == [1052.0]
    assert len(scene.of(events.RankInfos)) == 1


def test_the_dead_are_seen_until_they_are_replaced(play: Play) -> None:
    play(_dead)


async def _dead(scene: Scene) -> None:
    scene.coordinator.ranks = {}
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


def test_what_a_script_prints_counts_until_it_tells_itself(play: Play) -> None:
    play(_printed)


async def _read(scene: Scene) -> None:
    scene.second()
    await asyncio.wait_for(scene.collector._metrics._task or asyncio.sleep(0), 10)


async def _printed(scene: Scene) -> None:
    scene.coordinator.ranks = {}
    log = Path(scene.worker.folder, "stdout.log")
    log.write_text("nothing\n" * 100_000 + "step 5/9 loss 0.25\n")
    await _read(scene)
    (told,) = scene.of(events.MetricsMeasured)
    assert (told.step, told.total, told.values, told.samples) == (5, 9, {"loss": 0.25}, -1.0)
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
    # Of all that comes at once the last is kept, with a value that came once.
    for step in range(20):
        seldom = {"accuracy": 0.9} if step == 7 else {}
        scene.collector.measured(worker_messages.MeasuredStep(step=step, values={"loss": 1.0, **seldom}))
    scene.sampler.concluded()
    scene.second()  # nothing more of this attempt
    kept = [events.decode(text) for text in Path(scene.folder.path, "samples.jsonl").read_bytes().splitlines()]
    assert [event.step for event in kept if isinstance(event, events.MetricsMeasured)][2:] == [0, 19]
    assert isinstance(kept[-1], events.MetricsMeasured)
    assert kept[-1].values == {"loss": 1.0, "accuracy": 0.9}
    assert len([event for event in kept if isinstance(event, events.ClusterSample)]) == len(
        scene.of(events.ClusterSample)
    )


def test_a_disk_that_does_not_answer_holds_nobody_up(play: Play, tmp_path: Path) -> None:
    log, ends = tmp_path / "stdout.log", []
    os.mkfifo(log)  # to open it takes until somebody writes

    async def act(scene: Scene) -> None:
        scene.coordinator.ranks = {}
        for _ in range(3):
            scene.second()
            await asyncio.sleep(0.01)
        scene.sampler.concluded()
        assert len(scene.of(events.ClusterSample)) == 4
        await scene.sampler.end()
        await scene.collector.end()
        ends.append(os.open(log, os.O_RDWR))

    play(act)
    os.close(ends[0])


# -- the network between hosts


def test_of_every_pair_the_newest_result_is_kept(tmp_path: Path) -> None:
    home = str(tmp_path / "home")
    assert links.known(home, {"a", "b"}) is None
    old = [
        LinkMeasured(one="a", other="b", latency=1.0, there=1.0, back=1.0),
        LinkMeasured(one="b", other="c", latency=2.0, there=1.0, back=1.0),
    ]
    links.keep(home, old, 10.0)
    links.keep(home, [LinkMeasured(one="b", other="a", latency=3.0, there=1.0, back=1.0)], 20.0)
    links.keep(home, [], 30.0)
    assert links.known(home, {"a", "b"}) == (
        20.0,
        (LinkMeasured(one="b", other="a", latency=3.0, there=1.0, back=1.0),),
    )
    found = links.known(home, {"a", "b", "c"})
    assert found is not None
    assert (found[0], len(found[1])) == (10.0, 2)
    assert links.known(home, {"a", "x"}) is None
    (file,) = Path(home).iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.write_bytes(b"[{")
    assert links.known(home, {"a", "b"}) is None
