"""Faults that the training script makes itself, at a chosen step of a chosen rank, and in the middle of a recovery."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.chaos import oracle
from tests.chaos.campaign import Round, RoundResult
from tests.kit.cgroup import cgroup
from tests.kit.cli import PHALANX, Env, Result, alive, free_port, phalanx, run

# [step, rank, how, where, after]: see scripts/train.py
Fault = list[Any]
Plan = Callable[[random.Random, int, int], list[Fault]]

STEPS = ("step", "within", "backward")
RECOVERING = ("import", "connect", "join", "handover")


def spread(chance: random.Random, ranks: int, count: int, *ways: str) -> list[Fault]:
    """Return this many faults, one after another, with at least two steps between them."""
    return [
        [step, chance.randrange(ranks), chance.choice(ways), chance.choice(STEPS)] for step in _steps(chance, count)
    ]


def in_recovery(chance: random.Random, ranks: int, count: int) -> list[Fault]:
    """Ranks die, and while the group forms again, one dies at a point of that recovery, or the store does."""
    faults: list[Fault] = []
    for step in _steps(chance, (count + 1) // 2):
        first = len(faults)
        victim = chance.randrange(ranks)
        faults.append([step, victim, "kill", chance.choice(STEPS)])
        if len(faults) == count:
            break
        where = chance.choice(RECOVERING)
        # Only a new rank imports; every rank reaches the other points.
        who = victim if where == "import" else chance.randrange(ranks)
        how = "store" if where == "join" and chance.random() < 0.5 else "kill"
        faults.append([0, who, how, where, first])
    return faults


def at_a_save(chance: random.Random, ranks: int, count: int) -> list[Fault]:
    """Rank 0 dies before the file of a checkpoint is renamed, or a rank at the end of an epoch."""
    faults: list[Fault] = []
    for number, step in enumerate(_steps(chance, count)):
        if number % 2:
            faults.append([-(-step // oracle.EPOCH) * oracle.EPOCH, chance.randrange(ranks), "kill", "epoch"])
        else:
            faults.append([0, 0, "kill", "save", number - 1])
    return faults


def all_at_once(chance: random.Random, ranks: int, count: int) -> list[Fault]:
    return [[step, chance.randrange(ranks), "all"] for step in _steps(chance, count)]


def together(chance: random.Random, ranks: int, count: int) -> list[Fault]:
    """Two ranks die at the same step. A fault of this kind is one death."""
    faults: list[Fault] = []
    for step in _steps(chance, (count + 1) // 2):
        victims = chance.sample(range(ranks), 2)
        faults += [[step, victim, chance.choice(("kill", "segv", "exit 3"))] for victim in victims]
    return faults[:count]


def _steps(chance: random.Random, count: int) -> Iterator[int]:
    step = 1
    for _ in range(count):
        step += chance.randrange(2, 5)
        yield step


def placed(plan: Plan, *options: str, ranks: tuple[int, ...] = (2, 3), **env: str) -> Callable[[Round], RoundResult]:
    """Return a kind whose script makes the faults of a plan."""

    def run_round(this: Round) -> RoundResult:
        count = this.chance.choice(ranks)
        faults = plan(this.chance, count, this.faults)
        words = [option.replace("FOLDER", str(this.folder)) for option in options]
        done, epochs = trained(this, count, faults, *words, env=env)
        return judged(this, done, count, epochs)

    return run_round


def trained(this: Round, ranks: int, faults: list[Fault], *options: str, env: Env | None = None) -> tuple[Result, int]:
    """Run the training with these faults to its end, two epochs after the last."""
    epochs = needed(faults)
    words = ("run", "-g", str(ranks), "--cpu", *options, oracle.SCRIPT, str(this.folder), json.dumps(faults))
    return phalanx(*words, timeout=oracle.LONG, env={**this.env, "EPOCHS": str(epochs), **(env or {})}), epochs


def needed(faults: list[Fault]) -> int:
    return max(step for step, *_ in faults) // oracle.EPOCH + 3


def judged(this: Round, done: Result, ranks: int, epochs: int, *, code: int = 0, regroup: bool = True) -> RoundResult:
    """Check that the run is complete, and that every fault has happened. `regroup`: each has ended the group."""
    assert done.code == code, f"exit code {done.code}\n{done.out}\n{done.err}"
    oracle.check(this.folder, ranks, epochs=epochs)
    times = oracle.placed(this.folder)
    assert len(times) == this.faults, f"{len(times)} of {this.faults} faults happened\n{done.err}"
    seconds = oracle.delays(this.folder, [(at, regroup) for at in times], ranks)
    return RoundResult(this.faults, this.faults, seconds, oracle.slow(done.err, times, seconds))


# -- kinds without a plan


def children(this: Round) -> RoundResult:
    """Each rank has a server in its own session, whose port its replacement needs, and a child."""
    port = free_port()
    faults = spread(this.chance, 2, this.faults, "kill", "segv", "exit 7")
    done, epochs = trained(this, 2, faults, "--linger", "0", env={"PORTS": str(port)})
    result = judged(this, done, 2, epochs)
    pids = [int(pid) for pid in (this.folder / "children").read_text().split()]
    assert len(pids) == 2 * (2 + this.faults), f"{len(pids)} children of {2 + this.faults} ranks\n{done.err}"
    left = [pid for pid in pids if alive(pid)]
    assert not left, f"children of ranks that have ended live: {left}"
    return result


def exit_0(this: Round) -> RoundResult:
    """A rank exits with code 0 in the middle: the run ends and names it, and the same command continues."""
    faults = spread(this.chance, 2, this.faults, "exit 0", "leave 0")
    epochs = needed(faults)
    words = ("--checkpoints", str(this.folder / "kept"), "--checkpoint-every", "2")
    for number in range(this.faults):
        done, _ = trained(this, 2, faults, *words)
        assert done.code == 1, done.err
        (rank,) = {fault[1] for fault in faults[number : number + 1]}
        assert f"rank {rank} exited in the middle of the training, with exit code 0" in done.err, done.err
    done, _ = trained(this, 2, faults, *words)
    return replace(judged(this, done, 2, epochs), slow=[])  # another run was started each time


def edited(this: Round) -> RoundResult:
    """The script and its module are changed, broken or deleted on disk before a rank dies."""
    source = this.folder / "source"
    shutil.copytree(Path(oracle.SCRIPT).parent, source)
    ways = [f"edit {way}" for way in ("constant", "syntax", "delete")]
    faults = spread(this.chance, 2, this.faults, *ways)
    epochs = needed(faults)
    words = ("run", "-g", "2", "--cpu", str(source / "train.py"), str(this.folder), json.dumps(faults))
    done = phalanx(*words, timeout=oracle.LONG, env={**this.env, "EPOCHS": str(epochs)})
    result = judged(this, done, 2, epochs)
    assert "changed on the disk since the run began" in done.err, done.err
    return result


def greedy(this: Round) -> RoundResult:
    """Ranks use all memory of their cgroup, and the kernel kills them."""
    faults = spread(this.chance, 2, this.faults, "greedy")
    epochs = needed(faults)
    words = ("run", "-g", "2", "--cpu", oracle.SCRIPT, str(this.folder), json.dumps(faults))
    with cgroup("memory", "memory.limit_in_bytes", 1 << 30) as enter:
        done = run((*enter, *PHALANX, *words), timeout=oracle.LONG, env={"EPOCHS": str(epochs)})
    result = judged(this, done, 2, epochs)
    assert "the kernel killed a process of this cgroup" in done.err, done.err
    return result
