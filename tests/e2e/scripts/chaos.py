"""chaos.py FOLDER FAULTS: a training that is disturbed as FAULTS says, each once. As JSON, FAULTS is a list of
[step, rank, how, where, after].

how     kill segv exit raise; stop, spin: silent for good; pause: for a second; greedy: takes more memory than there is;
        late: dies as the interpreter ends; store, fork server, agent: these are killed
where   step (unless told), backward; import, connect, join, handover, save: step is 0 there, and it is the first time
        since the fault with the number `after`; not told: the one that stands before it

Each rank writes which samples it took in which step, and at the end its parameters, to FOLDER.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

FOLDER, FAULTS = Path(sys.argv[1]), json.loads(sys.argv[2])
SAMPLES, EPOCHS = 96, int(os.environ.get("EPOCHS", "3"))


class Fault(NamedTuple):
    number: int
    step: int
    rank: int
    how: str
    where: str = "step"
    after: int | None = None


def once(name: str) -> bool:
    """Whether nobody has done it before."""
    try:
        os.close(os.open(FOLDER / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def faulty(where: str, rank: int, step: int = 0) -> None:
    for number, words in enumerate(FAULTS):
        fault = Fault(number, *words)
        if (fault.step, fault.rank, fault.where) != (step, rank, where):
            continue
        after = number - 1 if fault.after is None else fault.after
        if not step and after >= 0 and not (FOLDER / f"fault {after}").exists():
            continue
        if once(f"fault {number}"):
            (FOLDER / f"victim {number}").write_text(str(os.getpid()))
            do(fault.how)


def do(how: str) -> None:
    match how:
        case "raise":
            raise ValueError("a broken sample")
        case "exit":
            os._exit(7)
        case "segv":
            ctypes.string_at(0)
        case "pause":
            time.sleep(1)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "spin":
            ctypes.PyDLL(None).sleep(100_000)  # Python's lock is never let go
        case "greedy":
            Path("/proc/self/oom_score_adj").write_text("1000")
            held = [bytearray(os.urandom(1)) * (64 << 20) for _ in range(200)]
            raise MemoryError(len(held))
        case "late":
            atexit.register(do, "kill")
        case "store":
            os.kill(store(), signal.SIGKILL)
        case "forkserver" | "agent":
            fork_server = os.getppid()
            stat = Path(f"/proc/{fork_server}/stat").read_text()
            os.kill(fork_server if how == "forkserver" else int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
            time.sleep(600)  # it dies with them
        case _:
            os.kill(os.getpid(), signal.SIGKILL)


def store() -> int:
    """Who else but the agent holds the socket of the store: a child of our parent."""
    port = f":{int(os.environ['MASTER_PORT']):04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    (inode,) = [row[9] for row in rows if row[1].endswith(port) and row[3] == "0A"]
    for child in Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split():
        for fd in Path(f"/proc/{child}/fd").iterdir():
            try:
                if os.readlink(fd) == f"socket:[{inode}]":
                    return int(child)
            except OSError:
                continue
    raise LookupError(inode)


RANK = int(os.environ["RANK"])
faulty("import", RANK)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import Dataset  # noqa: E402

import phalanx  # noqa: E402


def before(module: Any, name: str, where: str) -> None:
    """The fault happens in the middle of something of phalanx's own: just before it calls this function."""
    function: Callable[..., Any] = getattr(module, name)

    def wrapped(*args: Any, **options: Any) -> Any:
        faulty(where, RANK)
        return function(*args, **options)

    setattr(module, name, wrapped)


before(dist, "TCPStore", "connect")
before(dist, "init_process_group", "join")
before(os, "rename", "save")


class Numbered(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    def __init__(self) -> None:
        chance = torch.Generator().manual_seed(5)
        self.x, self.y = torch.randn(SAMPLES, 6, generator=chance), torch.randn(SAMPLES, 1, generator=chance)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, place: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.x[place], self.y[place], place


def train(run: phalanx.Run) -> None:
    data = run.loader(Numbered(), global_batch=12, shuffle=True)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if run.generation:
        faulty("handover", run.rank)
    run.keep(model=model, opt=opt, data=data)
    ddp = run.wrap(model)
    pause = float(os.environ.get("PAUSE", "0"))
    for _ in run.epochs(EPOCHS):
        for x, y, places in run.batches(data):
            with open(FOLDER / f"{run.steps + 1}.{run.rank}", "w") as file:  # a step that is done again writes it anew
                json.dump(places.tolist(), file)
            faulty("step", run.rank, run.steps)
            run.backward(nn.functional.mse_loss(ddp(x), y))
            faulty("backward", run.rank, run.steps)
            run.step(opt)
            time.sleep(pause)
    end = {name: value.flatten().tolist() for name, value in model.state_dict().items()}
    (FOLDER / f"end.{run.rank}").write_text(json.dumps([run.steps, run.generation, end]))


phalanx.main(train)
