"""survive.py FOLDER FAULTS [WORD …]: a training whose ranks die as FAULTS says, each once: [[step, rank, how], …].

At the end each rank writes its parameters, and which samples were committed in which step, to FOLDER. Some steps draw
random numbers of Python's and NumPy's.

once       model and optimizer are made once in a process; the output shows which
early      the model is wrapped before it is kept
halves     a step has two updates, between which ranks wait for each other
aborts     each group has something of NCCL's to abort
blocked    the same, and its abort never returns
forming    after the first fault, rank 1 is killed when it has met the others, while they connect to it; by gloo
deaf       after the first fault, rank 1 receives nothing from the others in its first new group; by gloo
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

import phalanx
from phalanx.worker.process_group import nccl

FOLDER, FAULTS = Path(sys.argv[1]), [tuple(fault) for fault in json.loads(sys.argv[2])]
SAMPLES, EPOCHS = 96, 3
ONCE, EARLY, HALVES = (word in sys.argv for word in ("once", "early", "halves"))
ABORTS, BLOCKED, FORMING, DEAF = (word in sys.argv for word in ("aborts", "blocked", "forming", "deaf"))
PATIENCE = 1.0  # seconds for NCCL's abort


class Numbered(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    def __init__(self) -> None:
        chance = torch.Generator().manual_seed(5)
        self.x, self.y = torch.randn(SAMPLES, 6, generator=chance), torch.randn(SAMPLES, 1, generator=chance)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, place: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.x[place], self.y[place], place


class Teacher(nn.Module):
    """Counts its forwards in a buffer, and every fourth one in a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("codes", torch.zeros(1 << 15))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if self.count % 4 == 0:
            self.codes += 1
        return x


def once(name: str) -> bool:
    """Return whether it is done for the first time."""
    try:
        os.close(os.open(FOLDER / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def die_together() -> None:
    """Kill the ranks whose fault is "then", once all of them have arrived: none regroups after another's death."""
    waiting = [FOLDER / f"then {number}" for number, fault in enumerate(FAULTS) if fault[2] == "then"]
    while not all(path.exists() for path in waiting):
        time.sleep(0.005)
    for how in (signal.SIGSTOP, signal.SIGKILL):
        for path in waiting:
            os.kill(int(path.read_text()), how)


def die(how: str, number: int) -> None:
    if how == "raise":
        raise ValueError("a broken sample")
    if how == "exit":
        os._exit(7)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "then":  # when the rank that gets stuck has arrived
        (FOLDER / f"{number}.new").write_text(str(os.getpid()))
        (FOLDER / f"{number}.new").rename(FOLDER / f"then {number}")
        while True:
            signal.pause()
    if how == "stuck":  # like a thread of gloo that is never woken
        die_together()
        lock = threading.Lock()
        with lock:
            lock.acquire()
    if how == "spin":  # like a CUDA call that waits for a kernel
        while True:
            pass
    if how == "compute":  # like a compiler, when another rank is dead
        while not (FOLDER / "fault 0").exists():
            pass
        end = time.monotonic() + 3 * PATIENCE
        while time.monotonic() < end:
            pass
        return
    if how == "segv":
        ctypes.string_at(0)
    os.kill(os.getpid(), signal.SIGKILL)


def faulty(run: phalanx.Run, where: str) -> None:
    for number, (step, rank, how, *place) in enumerate(FAULTS):
        here = place[0] if place else "step"
        if here == where and (step, rank) == (run.steps, run.rank) and (how == "always" or once(f"fault {number}")):
            die("raise" if how == "always" else how, number)


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(run: phalanx.Run) -> None:
    data = run.loader(Numbered(), global_batch=12, shuffle=True)
    model, opt = run.once(make) if ONCE else make()
    if ONCE:
        # New ranks and survivors draw the same random numbers from here on.
        drawn = [torch.rand(1).item(), random.random(), float(numpy.random.random())]
        assert drawn == run.group.broadcast(drawn)
        assert all(parameter.grad is None for parameter in model.parameters())
        with open(FOLDER / f"made.{run.rank}.{os.getpid()}", "a") as file:
            file.write(f"{id(model)}\n")
    pair = dist.new_group([0, 1]) if ONCE else None
    if run.group.generation:
        faulty(run, "handover")
    rate = torch.optim.lr_scheduler.LambdaLR(opt, lambda epoch: (1 + epoch) / EPOCHS)
    ddp = run.wrap(model) if EARLY else None
    teacher = Teacher()  # neither made once nor wrapped, and called first
    run.keep(model=model, teacher=teacher, opt=opt, rate=rate, data=data, epochs=0, begun=[0])
    ddp = ddp or run.wrap(model)
    idle = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in run.epochs(EPOCHS):
        for x, y, places in run.batches(data):
            with open(FOLDER / f"{run.steps + 1}.{run.rank}", "w") as file:  # a repeated step writes it again
                json.dump(places.tolist(), file)
            run.state["begun"][0] += 1
            faulty(run, "step")
            if pair is not None and run.rank < 2:  # no other rank is there while it waits
                dist.all_reduce(torch.ones(1), group=pair, async_op=True).wait()
            teacher(x)
            own = torch.rand(1, generator=run.group.generator).item()
            noise = 0.01 * (random.random() + float(numpy.random.random()) + own)
            loss = nn.functional.mse_loss(ddp(x) + noise, y)
            loss.register_hook(lambda _: faulty(run, "within"))
            run.backward(loss)
            faulty(run, "backward")
            run.step(opt, commit=not HALVES)
            if HALVES:
                faulty(run, "half")
                run.group.barrier()
                run.step(idle)
        rate.step()
        run.state["epochs"] += 1
        faulty(run, "end")
        run.group.barrier()  # like ranks that evaluate together
    # Values have counted it once, whatever was repeated.
    kept = {"epochs": EPOCHS, "begun": [run.steps]}
    assert dict(run.state) == kept, (dict(run.state), kept)
    assert (int(teacher.count), float(teacher.codes[0])) == (run.steps, run.steps // 4)
    end = {name: value.flatten().tolist() for name, value in model.state_dict().items()}
    (FOLDER / f"end.{run.rank}").write_text(json.dumps([run.steps, run.group.generation, end]))


def give_something_to_abort() -> None:
    """Replace NCCL, which needs GPUs: what it has for each group exists until torch forgets the group."""

    class Backend:
        def abort(self) -> None:
            if BLOCKED:
                threading.Event().wait()

    backends: dict[dist.ProcessGroup, Backend] = {}
    nccl.PATIENCE = PATIENCE
    nccl._backends = lambda: [backends.setdefault(group, Backend()) for group in [*dist.distributed_c10d._world.pg_map]]


def die_while_forming() -> None:
    plain = dist.init_process_group

    def form(*args: Any, **options: Any) -> None:
        rank, others = options["rank"], options["world_size"] - 1
        if (FOLDER / "fault 0").exists():
            once(f"forming {rank}")
            if rank == 1 and once("forming"):
                while len([*FOLDER.glob("forming *")]) <= others:
                    time.sleep(0.005)
                os.kill(os.getpid(), signal.SIGKILL)
        plain(*args, **options)

    dist.init_process_group = form


def form_once_without_hearing() -> None:
    plain = dist.init_process_group

    def form(*args: Any, **options: Any) -> None:
        before = connections()
        plain(*args, **options)
        if options["rank"] == 1 and (FOLDER / "fault 0").exists() and once("deaf"):
            for _, number in connections().items() - before.items():
                with socket.socket(fileno=os.dup(number)) as connection:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1 << 20)

    dist.init_process_group = form


def connections() -> dict[str, int]:
    """Return the connected TCP sockets of this process."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.getpeername()
                    found[os.readlink(f"/proc/self/fd/{name}")] = int(name)
        except OSError:
            continue
    return found


if ABORTS or BLOCKED:
    give_something_to_abort()
if FORMING:
    die_while_forming()
if DEAF:
    form_once_without_hearing()
phalanx.main(train, backend="gloo" if FORMING or DEAF else None)
