"""Snapshots in memory: what remains of them when their writers die at any moment, and what resumes from them."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.train.checkpoint.shares import Chunk
from phalanx.train.elastic.rescue import rescue, stillness
from phalanx.train.elastic.state_offer import StateOffer
from phalanx.train.snapshot import part
from phalanx.train.snapshot.counter import Counter, is_counter, reached, waited
from phalanx.train.snapshot.found import RESCUE, HeldPart, newest, transfers
from phalanx.train.snapshot.part import Part, Writer
from phalanx.train.snapshot.snapshots import Retry, Snapshots
from phalanx.worker.rendezvous.topology import Topology
from phalanx.worker.snapshot_memory import SnapshotMemoryClient
from tests.kit.cli import Env, Result, descendants, free_port, phalanx, start, until, warm_environment
from tests.kit.imported import python
from tests.launcher.agent.test_snapshot_memory import visit

pytestmark = pytest.mark.xdist_group("snapshot")  # they share undisturbed runs
SCRIPTS = Path(__file__).parents[1] / "scripts"
SCRIPT = str(SCRIPTS / "snapshot.py")
EVERY = ("--snapshot-every", "5")


# -- a part in its memory


def memories() -> list[int]:
    return [os.memfd_create("test") for _ in range(2)]


def writers(fds: list[int]) -> list[Writer]:
    def lend(fd: int, size: int) -> int:
        os.truncate(fd, max(size, os.fstat(fd).st_size))
        return os.dup(fd)

    return [Writer(functools.partial(lend, fd)) for fd in fds]


def write(writer: Writer, step: int, size: int = 1000) -> None:
    tensor = torch.full((size,), float(step))
    writer.finish(Part(step, "era", 0, (0,), {}, {}), writer.take([Chunk("x", (size,), (0,), tensor)]))


def test_killed_at_any_moment_one_of_the_two_is_whole() -> None:
    chance = random.Random(3)
    for _ in range(8):
        fds = memories()
        pid = os.fork()
        if pid == 0:
            try:
                torch.set_num_threads(1)
                both = writers(fds)
                for step in range(1 << 30):
                    write(both[step % 2], step, 300_000)
            finally:
                os._exit(1)
        until(lambda fds=fds: any(part.read(fd) for fd in fds), 20, "a first part")  # type: ignore[misc]
        time.sleep(chance.random() / 30)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        found = [one for fd in fds if (one := part.read(fd)) is not None]
        assert found
        for fd in fds:
            one = part.read(fd)
            if one is not None:
                assert part.differences(fd) == []
                (piece,) = one.pieces
                values = torch.frombuffer(
                    bytearray(os.pread(fd, piece.end - piece.begin, piece.begin)), dtype=torch.float32
                )
                assert values.unique().tolist() == [one.step]
            os.close(fd)


def test_what_is_being_written_has_no_seal_and_what_was_changed_is_noticed() -> None:
    fds = memories()
    both = writers(fds)
    for writer, step in zip(both, (7, 8), strict=True):
        write(writer, step)
    found = part.read(fds[0])
    assert found is not None
    assert (found.step, [piece.name for piece in found.pieces]) == (7, ["x"])
    os.pwrite(fds[0], b"!", found.pieces[0].begin + 5)
    assert "x: checksum is" in part.differences(fds[0])[0]
    table = part.read_seal(fds[1])
    assert table is not None
    os.pwrite(fds[1], b"!", table.begin + 5)
    assert part.read(fds[1]) is None
    both[0].take([Chunk("x", (3,), (0,), torch.zeros(3))])
    assert part.read_seal(fds[0]) is None
    for writer in both:
        writer.close()
    for fd in fds:
        os.close(fd)


class Memories:
    """A memory in this process, which lends nothing until `open` is set."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.open = threading.Event()

    def lend(self, name: str, size: int) -> int:
        assert is_counter(name) or self.open.wait(20)
        fd = self.held.setdefault(name, -1)
        self.held[name] = fd = os.memfd_create("test") if fd < 0 else fd
        os.truncate(fd, max(size, os.fstat(fd).st_size))
        return os.dup(fd)

    def drop(self, name: str) -> None:
        with contextlib.suppress(KeyError):
            os.close(self.held.pop(name))

    def names(self) -> list[str]:
        return list(self.held)

    def close(self) -> None:
        pass


class Two:
    """Rank 0 of two, of which the other has no memory."""

    rank, world_size, node_rank, is_main = 0, 2, 0, True
    device = torch.device("cpu")
    topology = Topology(((0, 1),), 0)

    def broadcast(self, text: str) -> str:
        return text

    def gather(self, mine: Any, **_: object) -> list[Any]:
        return [mine, "no room"] if isinstance(mine, str) and not mine else [mine]

    def max(self, numbers: dict[str, float]) -> dict[str, float]:
        return {**numbers, "failed": 1.0}


def test_off_while_memory_is_being_made() -> None:
    """It is not taken from the thread that allocates it, and no byte is held at the end."""
    memory, messages = Memories(), list[str]()
    snapshots = Snapshots(Two(), memory, say=messages.append)  # type: ignore[arg-type]
    assert not snapshots.save(1, {"model": torch.nn.Linear(600, 600)}, {})
    assert snapshots.off
    assert "without snapshots in memory: rank 1: no room" in messages[0]
    memory.open.set()
    snapshots.close()
    assert list(memory.held) == ["steps.0"]
    memory.drop("steps.0")


def test_a_rescue_is_of_one_whose_main_thread_sleeps() -> None:
    """A thread of it may copy its state, because it does not change meanwhile; otherwise nothing is kept."""
    memory = Memories()
    memory.open.set()
    past = StateOffer(7, 1, {"model": torch.nn.Linear(3, 3)}, rank=1)

    def rescued() -> bool:
        return rescue(past, memory, stillness() or "") == ""  # type: ignore[arg-type]

    assert not rescued()  # this is the main thread
    assert memory.names() == []
    beside = threading.Thread(target=until, args=(rescued, 20, "the main thread to sleep"))
    beside.start()
    beside.join()
    (fd,) = memory.held.values()
    found = part.read(fd)
    assert found is not None
    assert (found.step, found.rank, found.together, found.extra) == (7, 1, (1,), {"epoch": 1, "layouts": []})
    assert part.differences(fd) == []
    assert [piece.name for piece in found.pieces] == ["model.weight", "model.bias"]
    memory.drop("1.2")


def test_the_interval_continues_after_a_regroup() -> None:
    """If each group started the interval again, frequent deaths would prevent every snapshot."""

    def call(name: str) -> None:
        memory = SnapshotMemoryClient(name)
        first = Counter(memory, 0)
        first.set(7)
        first.close()
        time.sleep(0.05)
        again, new = Counter(memory, 0), Counter(memory, 1)
        assert waited(memory) >= 0.05
        assert reached(memory) == 7
        for counter in (again, new):
            counter.begin(8)
        assert waited(memory) < 0.05
        assert reached(memory) == 8
        for counter in (again, new):
            counter.close()
        memory.close()

    visit(call)


def test_a_snapshot_that_is_skipped_again_waits_longer() -> None:
    retry, due = Retry(), []
    for step in (10, 11, 13, 17):
        retry.later(step)
        due.append(retry.step)
    retry.reset()
    retry.later(30)
    assert due == [11, 13, 17, 25]
    assert retry.step == 31


# -- which snapshot is the newest


def held(node: int, rank: int, step: int, together: tuple[int, ...], turn: int = 0, era: str = "a") -> HeldPart:
    return HeldPart(node, rank, turn, step, era, together)


BOTH = (0, 1)
CASES: dict[str, tuple[list[HeldPart], int | None]] = {
    "nothing": ([], None),
    "one of two": ([held(0, 0, 5, BOTH)], None),
    "both": ([held(0, 0, 5, BOTH), held(0, 1, 5, BOTH)], 5),
    "the newest common one": ([held(0, r, 5, BOTH) for r in BOTH] + [held(0, 0, 10, BOTH, 1)], 5),
    "two eras": ([held(0, 0, 5, BOTH), held(0, 1, 5, BOTH, era="b")], None),
    "on two nodes": ([held(0, 0, 5, BOTH), held(1, 1, 5, BOTH)], 5),
    "one node has all": ([held(0, 0, 5, (0,)), held(1, 1, 10, (1,), 1), held(1, 2, 10, (2, 3), 1)], 10),
    "a rescue": ([held(0, 0, 5, BOTH), held(0, 1, 5, BOTH), held(0, 1, 7, (1,), RESCUE)], 7),
    "before it": ([held(0, 0, 8, BOTH), held(0, 1, 8, BOTH), held(0, 1, 7, (1,), RESCUE)], 8),
    "at a neighbour": ([held(0, 0, 5, BOTH), held(0, 1, 5, BOTH), held(1, 1, 10, BOTH)], 5),
}


@pytest.mark.parametrize("name", CASES)
def test_the_newest_that_is_whole(name: str) -> None:
    there, step = CASES[name]
    found = newest(there)
    assert (found.step if found else None) == step
    if found is not None:
        assert found.next_turn in {0, 1} - {found.turn}


def test_each_node_gets_once_what_its_ranks_need() -> None:
    together = (0, 1, 2)
    found = newest([held(0, 0, 5, together), held(0, 1, 5, together), held(0, 2, 5, together), held(1, 2, 5, together)])
    assert found is not None
    assert found.whole_for(1) == together
    planned = transfers(found, [[0], [0, 1], [0, 1, 2], [1]], ((0, 1), (2, 3)))
    assert [(one.name, one.sender, one.receiver) for one in planned] == [("0.0", 0, 2), ("1.0", 1, 3)]


# -- real ranks


@pytest.mark.extended
@pytest.mark.imported
def test_nodes_and_ranks_go_and_come() -> None:
    done = python(str(SCRIPTS / "snapshot_nodes.py"), timeout=150)
    assert done.code == 0, done.err
    assert done.out.splitlines() == [
        "a lost node's part is with its neighbour",
        "another number of ranks, and no shards",
        "a flipped byte is noticed",
        "without shards each node has all",
        "an agent for each rank",
        "no room is reported once",
    ]


@pytest.fixture(scope="module")
def env() -> Iterator[Env]:
    with warm_environment("torch.distributed.checkpoint", "torch.distributed.fsdp") as env:
        yield env


class Trainings:
    """Trainings of two ranks, and undisturbed ones to compare them with."""

    def __init__(self, env: Env) -> None:
        self.env = env
        self._ends: dict[str, Any] = {}

    def trained(self, folder: Path, how: str, *faults: list[int], options: tuple[str, ...] = EVERY) -> Result:
        words = ("run", "-g", "2", "--cpu", *options, SCRIPT, str(folder), how, json.dumps(faults))
        done = phalanx(*words, env=self.env, timeout=120)
        assert done.code == 0, done.err
        return done

    def undisturbed(self, how: str) -> Any:
        if how not in self._ends:
            with tempfile.TemporaryDirectory() as folder:
                self.trained(Path(folder), how, options=())
                self._ends[how] = ended(Path(folder))[1]
        return self._ends[how]


@pytest.fixture(scope="module")
def trainings(env: Env) -> Trainings:
    return Trainings(env)


def ended(folder: Path) -> tuple[list[str], Any]:
    """Return the steps at which the ranks began, and their final state."""
    begun, ends = ([(folder / f"{name}.{rank}").read_text() for rank in (0, 1)] for name in ("begun", "end"))
    assert begun[0] == begun[1]
    assert ends[0] == ends[1]
    return begun[0].split(), json.loads(ends[0])


@pytest.mark.extended
def test_a_lost_shard_comes_from_memory(tmp_path: Path, trainings: Trainings) -> None:
    done = trainings.trained(tmp_path, "fsdp", [7, 1])
    assert ended(tmp_path) == (["0", "5"], trainings.undisturbed("fsdp"))
    expected = r"rank 1 failed: SIGKILL[^;]*; regrouped, and step 6 was committed [\d.]+ s later, 2 steps done again"
    assert re.search(expected, done.err)


@pytest.mark.extended
def test_shards_of_a_lost_node_come_from_its_neighbour(tmp_path: Path, trainings: Trainings) -> None:
    """The rest continues with fewer ranks; then one of them dies too."""
    where = ("-n", "1:2", "-g", "2,1", "--master", f"127.0.0.1:{free_port()}", "--cpu", "--last-call", "60s", *EVERY)
    what = (SCRIPT, str(tmp_path), "fsdp", '[[7, 2, "node"], [12, 0]]')
    jobs = [start("run", *where, "-i", str(node), *what, env=trainings.env) for node in range(2)]
    until((tmp_path / "fault 0").exists, 60, "step 7")
    jobs[1].signal(signal.SIGKILL)
    assert [job.wait(120) for job in jobs] == [0, -signal.SIGKILL], "\n".join(job.both for job in jobs)
    begun, (steps, end) = ended(tmp_path)
    assert begun == ["0", "5", "10"]
    theirs = trainings.undisturbed("fsdp")
    assert steps == theirs[0]
    assert end == {name: pytest.approx(values, rel=1e-4, abs=1e-6) for name, values in theirs[1].items()}


@pytest.mark.extended
def test_all_ranks_die_at_once_and_again(tmp_path: Path, trainings: Trainings) -> None:
    done = trainings.trained(tmp_path, "ddp", [7, 0], [7, 1], [12, 0], [12, 1])
    assert ended(tmp_path) == (["0", "5", "10"], trainings.undisturbed("ddp"))
    assert done.err.count("2 steps done again") == 2


@pytest.mark.extended
def test_the_disk_may_have_a_newer_one(tmp_path: Path, trainings: Trainings) -> None:
    kept = str(tmp_path / "kept")
    options = (*EVERY, "--checkpoints", kept, "--checkpoint-every", "6")
    done = trainings.trained(tmp_path, "saved", [7, 0], [7, 1], [11, 0], [11, 1], options=options)
    assert ended(tmp_path) == (["0", "6", "10"], trainings.undisturbed("ddp"))
    assert "resumed at step 6" in done.out


@pytest.mark.extended
def test_a_script_that_cannot_regroup_is_started_again_from_memory(tmp_path: Path, trainings: Trainings) -> None:
    trainings.trained(tmp_path, "init", [7, 1], options=(*EVERY, "--max-restarts", "1"))
    assert ended(tmp_path) == (["0", "5"], trainings.undisturbed("ddp"))


@pytest.mark.extended
def test_off_is_off_and_nothing_is_left_by_a_agent_that_was_killed(tmp_path: Path, trainings: Trainings) -> None:
    trainings.trained(tmp_path, "ddp", [7, 0], [7, 1], options=("--snapshot-every", "off"))
    assert ended(tmp_path)[0] == ["0", "0"]
    (tmp_path / "long").mkdir()
    with start("run", "-g", "2", "--cpu", *EVERY, SCRIPT, str(tmp_path / "long"), "long", "[]") as job:
        job.wait_for(re.compile("waits"), timeout=60)
        family = [job.pid, *descendants(job.pid)]
        # Two workers, and the agent; for a moment also a child of the agent that has not executed its program yet.
        until(lambda: len(holders(family)) == 3, 20, "two workers and the agent to hold memory of snapshots")
        os.kill(job.pid, signal.SIGKILL)
        until(lambda: not holders(family), 20, "no process to hold memory of snapshots")


def holders(pids: list[int]) -> list[int]:
    """Return the processes that hold memory of a snapshot."""
    found = []
    for pid in pids:
        try:
            with open(f"/proc/{pid}/maps") as file:
                mapped = "phalanx-snapshot" in file.read()
            links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        except OSError:
            continue
        if mapped or any("phalanx-snapshot" in link for link in links):
            found.append(pid)
    return found
