"""Access to the store of a run: its ranks on all nodes, and no other process."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.e2e.jobs import PLAIN, all_gone, codes, texts, together
from tests.e2e.places import script
from tests.kit.cli import start
from tests.kit.lab import Lab, Node
from tests.kit.users import as_root
from tests.launcher.workers.store_host import COUNT, HELLO, NOBODY, PING, of_nobody

STORE = re.compile(r"store (\S+) (\d+)")

# HOST PORT BYTES COUNT USER: connect COUNT times as this user, and print the answer to the last connection.
CALLER = """
import encodings.idna, os, socket, sys
host, sent = sys.argv[1], bytes.fromhex(sys.argv[3])
port, count, user = int(sys.argv[2]), int(sys.argv[4]), int(sys.argv[5])
os.setresuid(user, user, user)
held, got = [], b""
for number in range(count):
    sock = socket.create_connection((host, port), timeout=60)
    held.append(sock)
    if len(held) > 300:
        held.pop(0).close()
try:
    sock.sendall(sent)
    got = sock.recv(64)
except ConnectionError:
    pass
print("got", got.hex())
"""


def called(node: Node, where: tuple[str, str], sent: bytes, *, count: int = 1, user: int = 0) -> str:
    """Return the store's answer to a process on a node."""
    words = (sys.executable, "-I", "-c", CALLER, *where, sent.hex(), str(count), str(user))
    done = node.run(words=words)
    assert done.code == 0, done.err
    return done.out


def test_other_hosts_and_other_users_of_a_node_do_not_reach_the_store(lab: Lab, tmp_path: Path) -> None:
    go = tmp_path / "go"
    jobs = together(lab, *PLAIN, script("ping_store.py"), str(go), ranks=(1, 1))
    (found, _) = jobs[0].wait_for(STORE, 2)
    where = found[1], found[2]
    assert where[0] == lab[0].address
    assert called(lab[2], where, HELLO + COUNT) == "got \n"  # a host that is not a node of the run
    assert called(lab[1], where, HELLO + COUNT, user=NOBODY) == "got \n"
    assert called(lab[0], where, HELLO + COUNT, user=NOBODY) == "got \n"
    assert called(lab[1], where, HELLO + PING) == f"got {b'ping'.hex()}\n"  # the user who runs the ranks there
    assert called(lab[2], where, HELLO + COUNT, count=1000) == "got \n"
    assert called(lab[1], where, HELLO + COUNT, count=1000, user=NOBODY) == "got \n"
    go.touch()
    assert codes(jobs) == [0, 0], texts(jobs)
    for who in (f"{lab[2].address}, which", f"{lab[1].address}, which", "user nobody"):
        assert jobs[0].err.count(f"the store refused a connection of {who}") == 1, texts(jobs)
    all_gone(lab)


@as_root
@pytest.mark.parametrize(
    "way", [pytest.param((), id="forked", marks=pytest.mark.smoke), pytest.param(("--fresh",), id="fresh")]
)
def test_other_users_of_the_host_do_not_reach_the_store(tmp_path: Path, way: tuple[str, ...]) -> None:
    go = tmp_path / "go"
    ask = (
        "sock = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=60)\n"
        "try:\n    sock.sendall(bytes.fromhex(sys.argv[3])); print('got', sock.recv(64).hex(), flush=True)\n"
        "except ConnectionError:\n    print('got ', flush=True)\n"
    )
    with start("run", "--cpu", "-g", "2", *way, script("ping_store.py"), str(go)) as job:
        (found, _) = job.wait_for(STORE, 2)
        with of_nobody(ask, found[1], found[2], (HELLO + COUNT).hex()) as process:
            assert process.communicate()[0] == "got \ndone\n"
        job.wait_for("the store refused a connection of user nobody")
        go.touch()
        assert job.wait(60) == 0, job.both
