"""train.py FOLDER FAULTS: a training that is disturbed as FAULTS says, each fault once. As JSON, FAULTS is a list of
[step, rank, how, where, after].

how     kill, segv, abort, bus, stop; exit N, leave N: os._exit, sys.exit; raise; spin: never releases the GIL;
        pause: a second; greedy: takes more memory than there is; late: dies as the interpreter ends; edit WAY: dies
        after it has changed the script's files; all: kills every rank; fill, free: the disk at $DISK is full, or no
        longer; store, forkserver, agent: these are killed
where   step (default), within (the backward), backward (after it), epoch (at its end); import, connect, join, handover,
        save: step is 0 there, and it is the first time since the fault `after` (a number; default: the one before)

EPOCHS in the environment is the number of epochs; without it, the training ends with the epoch in which FOLDER/end
appears. PAUSE: seconds per step. DROPOUT: its probability. PORTS: each rank starts a server on PORTS + its rank, and a
child.

Each rank appends to FOLDER/log.RANK which samples it takes and which steps it commits, and when; at the end it writes
its parameters to FOLDER/end.RANK. With EPOCHS, rank 0 writes those of each epoch to FOLDER/epochs.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import settings

FOLDER, FAULTS = Path(sys.argv[1]), json.loads(sys.argv[2])
SAMPLES, EPOCHS = 96, int(os.environ.get("EPOCHS", "0"))
DROPOUT = float(os.environ.get("DROPOUT", "0.2"))  # its random numbers depend on the rank
RANK = int(os.environ["RANK"])
SERVER = """
import socket, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("up", flush=True)
server.accept()
"""


class Fault(NamedTuple):
    number: int
    step: int
    rank: int
    how: str
    where: str = "step"
    after: int | None = None


def once(name: str) -> bool:
    """Return whether it is done for the first time."""
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
            (FOLDER / f"victim {number}").write_text(f"{os.getpid()} {time.time()}")
            do(*fault.how.split())


def do(how: str, code: str = "0") -> None:
    match how:
        case "raise":
            raise ValueError("a broken sample")
        case "exit":
            os._exit(int(code))
        case "leave":
            sys.exit(int(code))
        case "segv":
            ctypes.string_at(0)
        case "abort" | "bus" | "stop":
            number = {"abort": signal.SIGABRT, "bus": signal.SIGBUS, "stop": signal.SIGSTOP}[how]
            os.kill(os.getpid(), number)
        case "pause":
            time.sleep(1)
        case "spin":
            ctypes.PyDLL(None).sleep(100_000)  # the GIL is never released
        case "greedy":
            Path("/proc/self/oom_score_adj").write_text("1000")
            held = [bytearray(os.urandom(1)) * (64 << 20) for _ in range(200)]
            raise MemoryError(len(held))
        case "late":
            atexit.register(do, "kill")
        case "edit":
            edit(code)
            do("kill")
        case "fill" | "free":
            change_disk(full=how == "fill")
        case "store":
            os.kill(store(), signal.SIGKILL)
        case "forkserver" | "agent":
            fork_server = os.getppid()
            stat = Path(f"/proc/{fork_server}/stat").read_text()
            os.kill(fork_server if how == "forkserver" else int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
            time.sleep(600)  # it dies with them
        case "all":
            # Stop them first, so that none notices the death of another.
            pids = [int(path.read_text()) for path in sorted(FOLDER.glob("pid.*")) if path.name != f"pid.{RANK}"]
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in (*pids, *([os.getpid()] if number == signal.SIGKILL else [])):
                    os.kill(pid, number)
        case _:
            os.kill(os.getpid(), signal.SIGKILL)


def edit(way: str) -> None:
    """Change files that a replacement must not read: a constant, the syntax, or the existence of the file."""
    script, module = Path(__file__), Path(__file__).with_name("settings.py")
    match way:
        case "constant":
            module.write_text("LEARNING_RATE = 1.0\n")
        case "syntax":
            module.write_text("this is broken\n")
            script.write_text("this is broken\n")
        case _:
            module.unlink(missing_ok=True)
            script.unlink(missing_ok=True)


def change_disk(full: bool) -> None:
    """Use all space of the file system at $DISK, or free it."""
    ballast = Path(os.environ["DISK"], "ballast")
    ballast.unlink(missing_ok=True)
    if full:
        with open(ballast, "wb", buffering=0) as file:
            for size in (4096, 1):
                try:
                    while file.write(bytes(size)):
                        pass
                except OSError:
                    pass


def store() -> int:
    """Return the process besides the agent that has the socket of the store: a child of our parent."""
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


def serve(port: int) -> None:
    """Start processes that outlive this one: a server in its own session, and a child."""
    server = subprocess.Popen(
        [sys.executable, "-S", "-c", SERVER, str(port)], stdout=subprocess.PIPE, start_new_session=True
    )
    assert server.stdout
    if server.stdout.readline() != b"up\n":
        raise OSError(f"port {port} is taken")
    child = subprocess.Popen(["sleep", "600"])
    with open(FOLDER / "children", "a") as file:
        file.write(f"{server.pid} {child.pid}\n")


faulty("import", RANK)
if "PORTS" in os.environ:
    serve(int(os.environ["PORTS"]) + RANK)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import Dataset  # noqa: E402

import phalanx  # noqa: E402


def before(module: Any, name: str, where: str) -> None:
    """Make the fault happen inside phalanx: just before it calls this function."""
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


class Log:
    """What this rank does, one line each, written atomically: the rank may be killed at any time."""

    def __init__(self, run: phalanx.Run) -> None:
        self._file = os.open(FOLDER / f"log.{run.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        environ = os.environ
        group = environ.get("PHALANX_RUN", ""), environ.get("TORCHELASTIC_RESTART_COUNT", ""), run.group.generation
        self._group, self._size = " ".join(map(str, group)), run.world_size
        self._file_of_pid = FOLDER / f"pid.{run.rank}"
        self._file_of_pid.write_text(str(os.getpid()))

    def taken(self, step: int, places: list[int]) -> None:
        self._write({"step": step, "size": self._size, "taken": places})

    def committed(self, step: int) -> None:
        self._write({"step": step})

    def _write(self, line: dict[str, Any]) -> None:
        os.write(self._file, json.dumps({"time": time.time(), "group": self._group, **line}).encode() + b"\n")

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)


def train(run: phalanx.Run) -> None:
    data = run.loader(Numbered(), global_batch=12, shuffle=True)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(DROPOUT), nn.Linear(16, 1))
    opt = torch.optim.AdamW(model.parameters(), lr=settings.LEARNING_RATE)
    if run.group.generation:
        faulty("handover", run.rank)
    run.keep(model=model, opt=opt, data=data, begun=[0])
    ddp = run.wrap(model)
    pause = float(os.environ.get("PAUSE", "0"))

    def epoch(log: Log) -> None:
        for x, y, places in run.batches(data):
            log.taken(run.steps + 1, places.tolist())
            run.state["begun"][0] += 1
            faulty("step", run.rank, run.steps)
            loss = nn.functional.mse_loss(ddp(x), y)
            loss.register_hook(lambda _: faulty("within", run.rank, run.steps))
            run.backward(loss)
            faulty("backward", run.rank, run.steps)
            run.step(opt)
            log.committed(run.steps)
            time.sleep(pause)
        faulty("epoch", run.rank, run.steps)

    def parameters() -> dict[str, list[float]]:
        return {name: value.flatten().tolist() for name, value in model.state_dict().items()}

    with Log(run) as log:
        for _ in run.epochs(EPOCHS or 1_000_000):
            epoch(log)
            if EPOCHS and run.group.is_main:
                with open(FOLDER / "epochs", "a") as file:
                    file.write(json.dumps(parameters()) + "\n")
            if not EPOCHS and run.group.broadcast((FOLDER / "end").exists()):
                break
    # Values have counted it once, whatever was repeated.
    assert run.state["begun"] == [run.steps], (run.state["begun"], run.steps)
    (FOLDER / f"end.{run.rank}").write_text(json.dumps([run.steps, parameters()]))


phalanx.main(train)
