"""Savers that are killed: `checkpoint_killed.py FOLDER points|moments|ranks`. Forks: torch is imported once.

The state of step k is all k. After every death the newest checkpoint must load, be consistent, and be no older than the
last one that was reported as committed.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_ranks import Gloo
from torch import nn

from phalanx.train.checkpoint import Checkpoints


class Position:
    """Something plain to keep."""

    def __init__(self) -> None:
        self.consumed = 0

    def state_dict(self) -> dict[str, Any]:
        return {"consumed": self.consumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.consumed = state["consumed"]


def things() -> dict[str, Any]:
    return {"model": nn.Linear(128, 512), "head": nn.Linear(8, 8), "data": Position()}


def fill(kept: dict[str, Any], step: int) -> None:
    with torch.no_grad():
        for parameter in (*kept["model"].parameters(), *kept["head"].parameters()):
            parameter.fill_(step)
    kept["data"].consumed = step


def forked(in_child: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            in_child()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return pid


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def check(folder: str, at_least: int) -> None:
    """Check in a separate process, as after a restart."""

    def in_child() -> None:
        kept = things()
        fill(kept, -1)
        pipe: list[str] = []
        found = Checkpoints(folder, say=pipe.append)
        info = found.load(kept)
        step = info.step if info else 0
        assert not pipe, pipe
        assert step >= at_least, f"step {step} is left, {at_least} was committed"
        if info:
            values = [*kept["model"].parameters(), *kept["head"].parameters()]
            assert all(bool((value == step).all()) for value in values)
            assert (kept["data"].consumed, info.extra) == (step, {"step": step})
        found.close()

    assert ended(forked(in_child)) == 0


def kill_before(number: int) -> None:
    """Kill this process before its n-th call that changes the disk."""
    calls = 0
    for module, name in (
        *((os, name) for name in ("rename", "fsync", "write", "unlink", "rmdir", "open", "mkdir", "makedirs")),
        *((os, name) for name in ("ftruncate", "pwrite")),
        (shutil, "rmtree"),
    ):
        real = getattr(module, name)

        def counted(*args: Any, real: Any = real, **more: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **more)

        setattr(module, name, counted)


def save(folder: str, steps: range, pipe: int) -> None:
    kept = things()
    with Checkpoints(folder, keep_last=2, keep_best=1) as saver:
        for step in steps:
            fill(kept, step)
            saver.save(step, kept, {"step": step}, {"loss": 1 / step})
            saver.wait()
            os.write(pipe, step.to_bytes(4, "big"))


def committed(pipe: int) -> int:
    """Return the last step that was reported as committed."""
    data = b""
    while got := os.read(pipe, 65536):
        data += got
    os.close(pipe)
    return int.from_bytes(data[-4:], "big")


def points(folder: str) -> None:
    """Kill before the first call that changes the disk, before the second, … until one succeeds."""
    before = f"{folder}/before"
    read, write = os.pipe()
    assert ended(forked(lambda: save(before, range(1, 4), write))) == 0
    os.close(write)
    assert committed(read) == 3
    for number in range(1, 1000):
        place = f"{folder}/{number}"
        shutil.copytree(before, place)
        read, write = os.pipe()

        def in_child(place: str = place, number: int = number, write: int = write) -> None:
            kill_before(number)
            save(place, range(4, 6), write)

        pid = forked(in_child)
        os.close(write)
        code = ended(pid)
        check(place, max(3, committed(read)))
        # The next one continues, and cleans up.
        read, write = os.pipe()
        if number % 5 == 1:
            assert ended(forked(lambda place=place, write=write: save(place, range(10, 11), write))) == 0
            left = [name for name in os.listdir(place) if not name.startswith("step-") and name != ".lock"]
            assert not left, left
        os.close(write)
        os.close(read)
        shutil.rmtree(place)
        if code == 0:
            print(f"{number - 1} points")
            return
        assert code == -signal.SIGKILL, code


def moments(folder: str) -> None:
    """Kill at random moments, repeatedly in the same folder."""
    dice = random.Random(20)
    last = 0
    for _ in range(20):
        read, write = os.pipe()
        pid = forked(lambda last=last, write=write: save(folder, range(last + 1, last + 1000), write))
        os.close(write)
        first = os.read(read, 4)
        time.sleep(dice.uniform(0, 0.08))  # this is the moment
        os.kill(pid, signal.SIGKILL)
        assert ended(pid) == -signal.SIGKILL
        last = committed(read) or int.from_bytes(first, "big")
        check(folder, last)
        last += 1  # one more may exist than was reported
    print(f"{last} steps")


def ranks(folder: str) -> None:
    """Two ranks whose saves overlap. One is killed at a point; the other is killed too, or detects it by itself."""
    before = f"{folder}/before"
    read, write = os.pipe()
    assert ended(forked(lambda: save(before, range(1, 4), write))) == 0
    os.close(write)
    assert committed(read) == 3
    tried = 0
    for victim, stride in ((0, 5), (1, 2)):
        for number in range(1, 1000, stride):
            place = f"{folder}/{victim}-{number}"
            shutil.copytree(before, place)
            read, write = os.pipe()

            def in_child(
                rank: int, place: str = place, pipe: int = write, point: int = number, victim: int = victim
            ) -> None:
                store = dist.FileStore(f"{place}.store", 2)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
                Checkpoints.close.__kwdefaults__["patience"] = 0.2
                if rank == victim:
                    kill_before(point)
                kept = things()
                try:
                    with Checkpoints(place, Gloo(), keep_last=2, keep_best=1) as saver:
                        for step in range(4, 7):
                            fill(kept, step)
                            saver.save(step, kept, {"step": step}, {"loss": 1 / step})
                        saver.wait()
                        if rank == 0:
                            os.write(pipe, (6).to_bytes(4, "big"))
                except RuntimeError:  # raised by gloo: it has lost the other rank
                    os._exit(3)

            pids = [forked(lambda rank=rank: in_child(rank)) for rank in range(2)]
            os.close(write)
            code = ended(pids[victim])
            if code != 0 and number % 2:
                os.kill(pids[1 - victim], signal.SIGKILL)
            other = ended(pids[1 - victim])
            check(place, max(3, committed(read)))
            shutil.rmtree(place)
            tried += 1
            if code == 0:
                assert other == 0
                break
            assert code == -signal.SIGKILL, code
            assert other in (0, 3, -signal.SIGKILL), other
    print(f"{tried} points")


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"points": points, "moments": moments, "ranks": ranks}[sys.argv[2]](sys.argv[1])
