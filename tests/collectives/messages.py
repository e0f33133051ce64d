"""Messages between forked ranks, each scene with its own group: `python -m tests.collectives.messages`.

A program, because a process that forks should have no threads; one for all scenes, because torch is slow to import. It
prints the errors of each as JSON.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import re
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from phalanx.collectives import _native
from phalanx.collectives.engines.engine import ANY_SOURCE, CallKind, EngineCall, Op, Reduction
from phalanx.collectives.engines.shm import ShmEngine, ShmMessage
from phalanx.collectives.errors import CollectiveMismatch, CollectiveTimeout, GroupAborted, PeerLost

SLOT = 4096
PATIENCE = 60.0
LARGE = 300_000  # bytes: offered to the receiver instead of copied into the ring
SOON = 30.0  # seconds: takes 0.1 s on an idle machine, and the rank that ends may get a core late


@dataclass(frozen=True)
class Place:
    """A rank of a scene."""

    engine: ShmEngine
    rank: int
    signals: list[tuple[int, int]]  # a pipe per rank, independent of the group

    def send(self, data: bytes, to: int, tag: int = 0, timeout: float = PATIENCE) -> ShmMessage:
        return self.engine.send(_tensor(data), to, tag, timeout)

    def recv(self, size: int, source: int, tag: int = 0, timeout: float = PATIENCE) -> Arriving:
        memory = torch.full((size,), 255, dtype=torch.uint8)
        return Arriving(self.engine.recv(memory, source, tag, timeout), memory)

    def get(self, size: int, source: int, tag: int = 0, timeout: float = PATIENCE) -> bytes:
        return self.recv(size, source, tag, timeout).wait()

    def signal(self, rank: int) -> None:
        os.write(self.signals[rank][1], b"!")

    def wait_for_signal(self) -> None:
        ready, _, _ = select.select([self.signals[self.rank][0]], [], [], PATIENCE)
        assert ready, "no signal from another rank"
        os.read(self.signals[self.rank][0], 1)


@dataclass(frozen=True)
class Arriving:
    message: ShmMessage
    memory: torch.Tensor

    def wait(self) -> bytes:
        assert self.message.wait()
        return self.memory.numpy().tobytes()


Scene = Callable[[Place], None]
SCENES: dict[str, tuple[int, Scene]] = {}


def scene(ranks: int) -> Callable[[Scene], Scene]:
    def put(function: Scene) -> Scene:
        SCENES[function.__name__] = (ranks, function)
        return function

    return put


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def content(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def raises(error: type[Exception], text: str, action: Callable[[], object]) -> None:
    with pytest.raises(error, match=re.escape(text)):
        action()


# -- scenes


@scene(4)
def plans(place: Place) -> None:
    """Each message arrives once, whole, and in the order of sending by source and tag, whenever it is received."""
    for seed in range(8):
        _plan(place, seed)
        place.engine.barrier(PATIENCE)  # otherwise receives from any source could get messages of the next plan


def _plan(place: Place, seed: int) -> None:
    common = random.Random(seed)
    own = random.Random(seed * 100 + place.rank)
    sizes = (0, 1, 16, 100, 8192, 8193, 40_000, LARGE)
    # Tags from 10 are received from any source. All have the same size, so that the first one matches.
    messages = [(common.randrange(4), common.randrange(4), common.choice((0, 1, 2, 10, 11))) for _ in range(60)]
    letters = [
        (source, to, tag, number, 5000 * (tag - 9) if tag >= 10 else common.choice(sizes))
        for number, (source, to, tag) in enumerate(messages)
    ]
    outgoing = [m for m in letters if m[0] == place.rank]
    by_box: dict[tuple[int, int], list[tuple[int, int, int, int, int]]] = {}
    for letter in letters:
        if letter[1] == place.rank:
            by_box.setdefault((letter[0] if letter[2] < 10 else ANY_SOURCE, letter[2]), []).append(letter)
    boxes = [box for box, waiting in by_box.items() for _ in waiting]
    own.shuffle(boxes)
    sent: list[ShmMessage] = []
    came: list[tuple[tuple[int, int], Arriving]] = []
    taken = dict.fromkeys(by_box, 0)
    while outgoing or boxes:
        if outgoing and (not boxes or own.random() < 0.5):
            _, to, tag, number, size = outgoing.pop(0)
            sent.append(place.send(content(number, size), to, tag))
        else:
            box = boxes.pop()
            came.append((box, place.recv(by_box[box][taken[box]][4], *box)))
            taken[box] += 1
            came[-1][1].message.done()
    got: dict[tuple[int, int], list[bytes]] = {}
    data = {id(arriving): arriving.wait() for _, arriving in own.sample(came, len(came))}
    for box, arriving in came:
        if box[0] != ANY_SOURCE:
            assert arriving.message.source == box[0]
        got.setdefault((arriving.message.source, box[1]), []).append(data[id(arriving)])
    for message in sent:
        assert message.wait()
        assert message.done()
    wanted: dict[tuple[int, int], list[bytes]] = {}
    for source, to, tag, number, size in letters:
        if to == place.rank:
            wanted.setdefault((source, tag), []).append(content(number, size))
    assert {box: _brief(all_) for box, all_ in got.items()} == {box: _brief(all_) for box, all_ in wanted.items()}
    assert got == wanted


def _brief(all_: list[bytes]) -> list[tuple[int, str]]:
    return [(len(data), data[:4].hex()) for data in all_]


@scene(2)
def last_first(place: Place) -> None:
    """Many large messages, received in the reverse order of their tags."""
    if place.rank == 0:
        sent = [place.send(content(tag, 20_000 + tag), 1, tag) for tag in range(200)]
        assert all(message.wait() for message in sent)
    else:
        for tag in reversed(range(200)):
            assert place.get(20_000 + tag, 0, tag) == content(tag, 20_000 + tag)
        os._exit(0)  # a message that was received was also sent


@scene(2)
def both_full(place: Place) -> None:
    """More small messages than a ring holds, both ways, before the first receive."""
    other = 1 - place.rank
    sent = [place.send(content(number, 3000), other) for number in range(200)]
    sent.append(place.send(content(7, LARGE), other, 1))
    assert place.get(LARGE, other, 1) == content(7, LARGE)
    for number in range(200):
        assert place.get(3000, other) == content(number, 3000)
    assert all(message.wait() for message in sent)


@scene(2)
def while_computing(place: Place) -> None:
    """The receiver does not wait, and a message that it started still arrives."""
    for size in (20_000, LARGE, 3_000_000):
        if place.rank == 0:
            arriving = place.recv(size, 1)
            place.signal(1)
            place.wait_for_signal()  # the other rank's send is complete without a call here
            assert arriving.wait() == content(size, size)
        else:
            place.wait_for_signal()
            assert place.send(content(size, size), 0).wait()
            place.signal(0)


@scene(2)
def long_awaited(place: Place) -> None:
    """No thread is woken repeatedly for a message that does not arrive; once sent, it arrives."""
    if place.rank == 1:
        place.wait_for_signal()
        place.send(content(4, 100), 0).wait()
        return
    awaited = place.recv(100, 1)
    for _ in range(2):  # seconds; in the first it may still poll fast
        before = _woken()
        time.sleep(1)
    assert _woken() - before < 150, "times a second"  # 50; about 500 if it polled at the initial rate
    place.signal(1)
    until = time.monotonic() + PATIENCE
    while not awaited.message.done() and time.monotonic() < until:
        time.sleep(0.001)
    assert awaited.wait() == content(4, 100)


def _woken() -> int:
    """Return how often threads of this process have slept."""
    found = 0
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/status") as file:
            found += int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)", file.read(), re.MULTILINE)[1])
    return found


@scene(2)
def beside_collectives(place: Place) -> None:
    total = torch.ones(3)
    call = EngineCall(CallKind.ALL_REDUCE, outs=[total], reduction=Reduction(Op.SUM), timeout=PATIENCE)
    if place.rank == 0:
        arriving = place.recv(LARGE, 1)
        place.engine.run(call)
        assert arriving.wait() == content(1, LARGE)
    else:
        place.engine.run(call)
        assert place.send(content(1, LARGE), 0).wait()
    assert total.tolist() == [2, 2, 2]


@scene(2)
def let_go(place: Place) -> None:
    """A message whose sender has dropped all references still has its data."""
    if place.rank == 0:
        for tag in range(4):
            place.send(content(tag, LARGE), 1, tag)
        gc.collect()
        rubbish = [torch.zeros(LARGE, dtype=torch.uint8) for _ in range(8)]
        place.signal(1)
        assert place.get(1, 1) == b"!"
        assert place.send(b"?", 1).wait()
        assert not place.engine._dropped
        del rubbish
    else:
        place.wait_for_signal()
        for tag in range(4):
            assert place.get(LARGE, 0, tag) == content(tag, LARGE)
        assert place.send(b"!", 0).wait()
        assert place.get(1, 0) == b"?"


@scene(2)
def sizes_differ(place: Place) -> None:
    for size in (8, LARGE):
        if place.rank == 0:
            text = f"recv of {2 * size} bytes from rank 1: it sent {size} bytes (tag 5)"
            raises(CollectiveMismatch, text, lambda size=size: place.get(2 * size, 1, 5))  # type: ignore[misc]
        elif size == 8:
            assert place.send(bytes(size), 0, 5).wait()  # already complete
        else:
            text = f"send of {size} bytes to rank 0: it receives {2 * size} bytes (tag 5)"
            raises(CollectiveMismatch, text, lambda size=size: place.send(bytes(size), 0, 5).wait())  # type: ignore[misc]
    place.engine.barrier(PATIENCE)  # the group continues


@scene(3)
def dead_sender(place: Place) -> None:
    """Data that rank 1 has copied arrives, data that must be read from it does not, and the others continue."""
    if place.rank == 1:
        place.send(b"last", 0, 1)
        place.send(bytes(LARGE), 0, 2)
        place.send(b"for anyone", 2, 3)
        os._exit(0)
    other = 2 - place.rank
    if place.rank == 0:
        waiting = place.recv(8, 1, 9)
        begun = time.monotonic()
        raises(PeerLost, "recv: peer lost, rank 1 has ended", waiting.wait)
        assert time.monotonic() - begun < SOON
        assert place.get(4, 1, 1) == b"last"
        raises(PeerLost, "rank 1 has ended", lambda: place.get(LARGE, 1, 2))
        raises(PeerLost, "rank 1 has ended", lambda: place.get(8, 1, 9))
        raises(PeerLost, "send: peer lost, rank 1 has ended", lambda: place.send(bytes(LARGE), 1).wait())
    else:
        assert place.get(10, ANY_SOURCE, 3) == b"for anyone"
    sent = place.send(content(3, LARGE), other)
    assert place.get(LARGE, other) == content(3, LARGE)
    assert sent.wait()
    if place.rank == 2:
        place.send(b"bye", 0, 4)
        os._exit(0)
    assert place.get(3, ANY_SOURCE, 4) == b"bye"
    raises(PeerLost, "recv: peer lost, all other ranks have ended", lambda: place.get(3, ANY_SOURCE, 4))


@scene(2)
def dead_receiver(place: Place) -> None:
    """A receiver dies at each point of a large message: before or after the receive starts; also with a full ring."""
    if place.rank == 1:
        place.recv(20_000_000, 0, 1)
        place.wait_for_signal()
        os._exit(0)
    sent = [place.send(bytes(20_000_000), 1, tag) for tag in range(3)]
    sent += [place.send(bytes(8000), 1) for _ in range(40)]
    place.signal(1)
    for message in sent[2], sent[1], sent[0], sent[-1]:
        begun = time.monotonic()
        if message not in {sent[1], sent[-1]}:  # these may have completed
            raises(PeerLost, "send: peer lost, rank 1 has ended", message.wait)
            raises(PeerLost, "send: peer lost, rank 1 has ended", message.wait)  # the same error again
        else:
            with contextlib.suppress(PeerLost):
                assert message.wait()
        assert time.monotonic() - begun < SOON


@scene(2)
def killed_while_reading(place: Place) -> None:
    """A sender dies while its memory is read, repeatedly."""
    if place.rank == 1:
        for _ in range(3):
            place.send(bytes(64_000_000), 0)
        place.signal(0)
        time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    arriving = [place.recv(64_000_000, 1) for _ in range(3)]
    place.wait_for_signal()
    raises(PeerLost, "rank 1 has ended", lambda: [each.wait() for each in arriving] + [place.get(1, 1)])


@scene(3)
def aborted(place: Place) -> None:
    if place.rank == 2:
        for rank in (0, 1):
            assert place.get(1, rank) == b"!"
        place.engine.abort()
        return
    waiting = place.recv(LARGE, 2, 1) if place.rank else place.send(bytes(LARGE), 2, 1)
    anyone = place.recv(1, ANY_SOURCE, 2)
    place.send(b"!", 2)
    begun = time.monotonic()
    raises(GroupAborted, "the process group was aborted", waiting.wait)
    raises(GroupAborted, "the process group was aborted", anyone.wait)
    raises(GroupAborted, "the process group was aborted", lambda: place.get(1, 2))
    assert time.monotonic() - begun < SOON


@scene(3)
def left(place: Place) -> None:
    if place.rank == 1:
        place.send(b"before", 0)
        place.engine.close()
        place.wait_for_signal()
        return
    if place.rank == 0:
        raises(PeerLost, "rank 1 has ended", lambda: place.get(1, 1, 1))
        assert place.get(6, 1) == b"before"
        place.signal(1)


@scene(2)
def too_late(place: Place) -> None:
    if place.rank == 0:
        raises(
            CollectiveTimeout,
            "recv timed out: it waited 0.1 s for rank 1 (tag 3)",
            lambda: place.get(8, 1, 3, timeout=0.1),
        )
        raises(
            CollectiveTimeout,
            "recv timed out: it waited 0.1 s for any rank (tag 3)",
            lambda: place.get(8, ANY_SOURCE, 3, 0.1),
        )
        arriving = place.recv(8, 1, 4)
        assert not arriving.message.wait(0.05)  # smaller than the message that was sent
        assert not arriving.message.done()
        text = "send timed out: it waited 0.1 s for rank 1 (tag 3)"
        raises(CollectiveTimeout, text, lambda: place.send(content(1, LARGE), 1, 3, 0.1).wait())
        place.signal(1)
        assert arriving.wait() == b"in time!"
    else:
        place.wait_for_signal()
        raises(CollectiveTimeout, "recv timed out", lambda: place.get(LARGE, 0, 3))  # it was cancelled: no data is read
        place.send(b"in time!", 0, 4)
    place.engine.barrier(PATIENCE)


@scene(2)
def interrupted(place: Place) -> None:
    """A signal handler runs while its thread waits, and its exception ends the wait."""
    if place.rank == 0:

        def stop(number: int, frame: object) -> None:
            raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            place.get(LARGE, 1)
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("was not interrupted")
        place.signal(1)
    else:
        place.wait_for_signal()
    other = 1 - place.rank
    sent = place.send(content(2, LARGE), other, 1)
    assert place.get(LARGE, other, 1) == content(2, LARGE)
    assert sent.wait()


# -- runner


def run_scene(name: str, *, direct: bool) -> str:
    """Return the errors of all ranks."""
    ranks, function = SCENES[name]
    fd = os.memfd_create("messages", os.MFD_CLOEXEC)
    os.ftruncate(fd, _native.memory(ranks, SLOT))
    signals, doors = [[os.pipe() for _ in range(ranks)] for _ in range(2)]
    out, report = os.pipe()
    pids = []
    for rank in range(ranks):
        pids.append(os.fork())
        if not pids[-1]:
            os.close(out)
            _act(function, rank, fd, doors[rank][0], signals, direct, report)
    for _, door in doors:
        os.write(door, json.dumps(pids).encode() + b"\n")
    os.close(report)
    with open(out) as troubles:
        trouble = troubles.read()
    for pid in pids:
        os.waitpid(pid, 0)
    for end in [fd, *(end for pipe in signals + doors for end in pipe)]:
        os.close(end)
    return trouble


def _act(
    function: Scene, rank: int, fd: int, door: int, signals: list[tuple[int, int]], direct: bool, report: int
) -> None:
    try:
        signal.alarm(100)
        pids = json.loads(os.read(door, 4096))
        engine = ShmEngine(fd, rank, pids, range(len(pids)), PATIENCE, slot=SLOT, direct=direct)
        function(Place(engine, rank, signals))
        engine.close()
    except BaseException:
        os.write(report, f"rank {rank}: {traceback.format_exc()}".encode())
    finally:
        os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    chosen = sys.argv[1:] or list(SCENES)
    ways = ("direct", "staged")
    print(json.dumps({f"{name} {way}": run_scene(name, direct=way == "direct") for name in chosen for way in ways}))
