"""Processes that a dead rank has started end with it, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.forkserver import linux
from phalanx.launcher.workers.regroup.orphan_cleanup import ProcessRow, environ_of, is_of, orphans_of, processes
from tests.kit.cli import alive, free_port, phalanx, start, until

AGENT, FORK_SERVER, DEAD, LIVING = 10, 11, 20, 30
TABLE = [
    ProcessRow(AGENT, 1, AGENT),
    ProcessRow(FORK_SERVER, AGENT, AGENT),
    ProcessRow(LIVING, FORK_SERVER, LIVING),
    ProcessRow(31, LIVING, LIVING),  # a data worker of the living rank
    ProcessRow(32, LIVING, 32),
    ProcessRow(21, FORK_SERVER, DEAD),  # data workers of the dead rank
    ProcessRow(22, FORK_SERVER, 22),  # with its own session
    ProcessRow(23, 22, 22),
    ProcessRow(24, DEAD, 24),  # the kernel has not given it another parent yet
    ProcessRow(40, FORK_SERVER, 40),  # an orphan of the living rank
    ProcessRow(50, 1, 50),  # a rank of another agent on this machine
]


@pytest.mark.parametrize(
    ("own", "found"),
    [
        ({22}, [21, 22, 23, 24]),
        (set(), [21, 24]),
        ({31, 32, 50}, [21, 24]),  # below a live worker, or of another user
        ({LIVING, AGENT, FORK_SERVER}, [21, 24]),
    ],
)
def test_processes_that_a_dead_rank_started(own: set[int], found: list[int]) -> None:
    table = {row.pid: row for row in TABLE}
    reapers = {AGENT, FORK_SERVER}
    assert orphans_of(table, DEAD, living={LIVING}, reapers=reapers, is_own=own.__contains__) == found


def test_a_worker_that_never_started_has_left_nothing() -> None:
    """Its pid is 0, the parent of init: every process of the machine would be below it."""
    init = ProcessRow(1, 0, 0)
    table = {row.pid: row for row in (init, *TABLE)}
    reapers = {AGENT, FORK_SERVER}
    assert orphans_of(table, 0, living={LIVING}, reapers=reapers, is_own=lambda _: True) == []


def test_a_worker_that_is_being_started_spares_nothing() -> None:
    """Two ranks have died: the replacement of the first has no pid yet when the second is replaced."""
    table = {row.pid: row for row in (ProcessRow(1, 0, 0), *TABLE)}
    found = orphans_of(table, DEAD, living={LIVING, 0}, reapers={AGENT, FORK_SERVER}, is_own={22}.__contains__)
    assert found == [21, 22, 23, 24]


def test_an_environment_names_the_run_and_the_place() -> None:
    environ = {b"PHALANX_RUN": b"a", b"LOCAL_RANK": b"1"}
    assert is_of(environ, "a", 1)
    assert not is_of(environ, "a", 0)
    assert not is_of(environ, "b", 1)
    assert not is_of({}, "a", 1)


def test_processes_are_read_from_proc() -> None:
    environ = {"PHALANX_RUN": "a", "LOCAL_RANK": "1"}
    with start(words=("sleep", "600"), env=environ) as job:
        assert processes()[job.pid].pid == job.pid
        until(lambda: is_of(environ_of(job.pid), "a", 1))  # once it has replaced its fork


SCRIPT = """
import os, signal, subprocess, sys, torch, phalanx

SERVER = '''
import socket, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("up", flush=True)
server.accept()
'''

def train(run):
    if run.rank == 1:  # its own server, as a debugger, a monitor or an inference engine is
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER, sys.argv[1]], stdout=subprocess.PIPE, start_new_session=True
        )
        assert server.stdout.readline() == b"up\\n", "the port is taken"
        with open("servers", "a") as file:
            print(server.pid, subprocess.Popen(["sleep", "600"]).pid, file=file)
    model = torch.nn.Linear(2, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    data = run.loader(torch.utils.data.TensorDataset(torch.randn(40, 2)), batch_size=2)
    run.keep(model=model, opt=opt, data=data)
    ddp = run.wrap(model)
    for _ in run.epochs(1):
        for (x,) in run.batches(data):
            run.backward(ddp(x).pow(2).mean())
            run.step(opt)
            if (run.rank, run.steps, run.group.generation) == (1, 4, 0):
                os.kill(os.getpid(), signal.SIGKILL)

phalanx.main(train)
"""


@pytest.mark.extended
def test_a_replacement_gets_the_ports_of_the_dead_rank(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = phalanx(
        "run", "-g", "2", "--cpu", "--linger", "0", "train.py", str(free_port()), cwd=str(tmp_path), timeout=120
    )
    assert done.code == 0, done.err
    servers = (tmp_path / "servers").read_text().splitlines()
    assert len(servers) == 2
    assert not [pid for line in servers for pid in line.split() if alive(int(pid))]


def test_nothing_is_below_a_process_that_has_not_started() -> None:
    assert linux.descendants(0) == []
