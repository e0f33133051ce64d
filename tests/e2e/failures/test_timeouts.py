"""A collective that times out names the rank that did not arrive, and where it was."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.kit.cli import phalanx

pytestmark = [pytest.mark.xdist_group("failures"), pytest.mark.warmed]

HEAD = """\
import os, threading, time, torch, torch.distributed as dist
from datetime import timedelta
rank = int(os.environ["RANK"])
dist.init_process_group({backend!r}, timeout=timedelta(seconds={first}))
dist.all_reduce(torch.ones(1)){then}
def load():
    time.sleep(1000)
def evaluate():
    x = torch.ones(200, 200)
    while True:
        x = (x @ x).clamp(0, 1)
"""


def head(backend: str, seconds: int) -> str:
    """Return the first lines of a script. The ranks have more time to meet: on a busy machine some start late.

    The timeout of a group can be set later with gloo, but not with shm, and not for its receives.
    """
    later = f"; dist.distributed_c10d._set_pg_timeout(timedelta(seconds={seconds}))"
    return HEAD.format(backend=backend, first=300, then=later)


LATE = {
    "gloo, sleeping": (
        "gloo",
        "if rank == 1: load()\ndist.all_reduce(torch.ones(1))\n",
        "rank 1 did not reach all_reduce #2 (4 B) at late.py:13 within 5 s: it was sleeping at late.py:7 in load",
    ),
    "gloo, computing": (
        "gloo",
        "if rank == 0: evaluate()\ndist.barrier()\n",
        "rank 0 did not reach barrier #2",
    ),
    "shm": (
        "shm",
        "if rank == 1: load()\ndist.all_reduce(torch.ones(1))\n",
        "rank 1 did not reach all_reduce #2 (4 B) at late.py:13 within 8 s: it was sleeping at late.py:7 in load",
    ),
    "monitored barrier": (
        "gloo",
        "if rank == 2: load()\ndist.monitored_barrier(timeout=timedelta(seconds=5))\n",
        "rank 2 did not reach monitored_barrier at late.py:13 within 5 s: it was sleeping at late.py:7 in load",
    ),
    "recv": (
        "gloo",
        "if rank == 0: dist.recv(torch.ones(1), 2)\nelse: load()\n",
        "rank 2 did not send what rank 0 waited for in recv from rank 2 at late.py:12 within 8 s: it was sleeping",
    ),
    "two groups in different order": (
        "gloo",
        "both = dist.new_group([0, 1, 2])\ndist.all_reduce(torch.ones(1), group=both if rank == 1 else None)\n",
        "deadlock between two groups",
    ),
}


@pytest.mark.parametrize(
    ("backend", "body", "expected"),
    [pytest.param(*late, id=name, marks=[pytest.mark.smoke] * (name == "shm")) for name, late in LATE.items()],
)
def test_who_did_not_come_is_named_and_not_its_victim(tmp_path: Path, backend: str, body: str, expected: str) -> None:
    path = tmp_path / "late.py"
    if "within 8 s" in expected:
        path.write_text(HEAD.format(backend=backend, first=8, then="") + body)
    else:
        path.write_text(head(backend, 5) + body)
    result = phalanx("run", "-g", "3", "--cpu", str(path))
    message = result.err[result.err.rindex("phalanx: ") :]
    assert result.code == 1
    assert message.startswith(f"phalanx: {expected}")
    assert " timed out: " in message
    why = phalanx("why")  # the run has ended: from its folder only
    assert expected in why.out


def test_a_script_that_sets_its_own_port_is_reported_where_each_rank_waits(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "import os, torch.distributed as dist\n"
        "from datetime import timedelta\n"
        "os.environ['MASTER_PORT'] = str(1 + int(os.environ['RANK']))\n"  # no process listens there
        "dist.init_process_group('gloo', timeout=timedelta(seconds=6))\n"
    )
    result = phalanx("run", "-g", "2", "--cpu", str(path))
    message = result.err[result.err.rindex("phalanx: ") :]
    assert message.startswith(
        "phalanx: rank 0 waits for a store at 127.0.0.1:1; rank 1 waits for a store at 127.0.0.1:2 in "
        "init_process_group at own.py:4: the script has set MASTER_PORT (no rank listens "
        "there, the launcher's store is at 127.0.0.1:"
    )
    assert "fix: do not set MASTER_PORT in the script" in message


def test_a_stall_that_ends_by_a_timeout_is_reported_once_and_not_taken_for_progress(tmp_path: Path) -> None:
    path = tmp_path / "child.py"
    path.write_text(
        head("gloo", 15)
        + "import subprocess\nif rank == 1: subprocess.run(['sleep', '1000'])\ndist.all_reduce(torch.ones(1))\n"
    )
    result = phalanx("run", "-g", "3", "--cpu", "--stall-timeout", "2", str(path))
    assert re.search(
        r"rank 1 is waiting for a process that it has started \(process \d+ `sleep 1000`, sleeping\)", result.err
    )
    message = result.err[result.err.rindex("phalanx: ") :]
    assert message.startswith(
        "phalanx: rank 1 did not reach all_reduce #2 (4 B) at child.py:14 within 15 s: it was waiting for"
    )
    assert "`sleep 1000`, sleeping" in message
    assert "the run resumed after" not in result.err


def test_nccls_watchdog_names_the_collective_and_aborts(tmp_path: Path) -> None:
    path = tmp_path / "watchdog.py"
    path.write_text(
        head("gloo", 5)
        + "if rank == 1: load()\n"
        + "expected = b'[PG ID 0 PG GUID 0(default_pg) Rank 0] Watchdog caught collective operation timeout: '\n"
        + "expected += b'WorkNCCL(SeqNum=2, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran'\n"
        + "os.write(2, expected)\nos.abort()\n"
    )
    result = phalanx("run", "-g", "2", "--cpu", str(path))
    message = result.err[result.err.rindex("phalanx: ") :]
    assert result.code == 134
    assert message.startswith(
        "phalanx: rank 1 did not reach all_reduce #2 within 10 min: it was sleeping at watchdog.py:7 in load"
    )
    assert "rank 0 timed out: SIGABRT (Aborted)" in message
