"""A node that fails: a short silence is only reported, a long one ends the job everywhere, and no process is left.

`--node-timeout` is 10 s where it must expire: a busy machine may let an agent wait for seconds. Where it must not
expire, it is the default, or longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.control.recording_proxy import RecordingProxy
from tests.e2e.jobs import PLAIN, TOKEN, all_gone, codes, texts, together
from tests.e2e.places import READY, script
from tests.kit.cli import PYTHON, start, until
from tests.kit.handle import Handle
from tests.kit.lab import Lab, Node
from tests.kit.ports import free_port
from tests.kit.proc import command, descendants

LOST_AFTER = 10
SHORT = ("--node-timeout", f"{LOST_AFTER}s")
PATIENT = ("--node-timeout", "90s")
PORT = 29500


def sleepers(lab: Lab, *options: str) -> list[Handle]:
    """Start a run on two nodes, with two ranks and one, that would sleep for minutes."""
    jobs = together(lab, *PLAIN, *options, script("sleepy.py"))
    jobs[0].wait_for(READY, 3)
    jobs[1].wait_for(READY, 1)
    return jobs


def workers(node: Node) -> list[str]:
    return [command for _, command in node.processes() if "-u" in command.split() and "scripts/" in command]


def silence(printed: str, job: Handle) -> int:
    """Return the seconds in what the node has printed about a lost one."""
    found = re.search(printed, job.err)
    assert found, job.both
    return int(found[1])


# -- silence


def _silent(jobs: list[Handle]) -> None:
    """Wait until both nodes have reported that the other one does not answer: after 3 seconds or more."""
    jobs[0].wait_for(re.compile(r"node 1 \(node2\) has not answered for \d+ s"))
    jobs[1].wait_for(re.compile(r"node 0 has not answered for \d+ s"))


def test_a_link_that_is_down_for_seconds_is_only_noted(lab: Lab, tmp_path: Path) -> None:
    jobs = together(lab, *PLAIN, *PATIENT, script("until_file.py"), str(tmp_path / "end"))
    jobs[0].wait_for(READY, 3)
    lab[1].link(False)
    _silent(jobs)
    lab[1].link(True)
    jobs[0].wait_for("node 1 (node2) answers again")
    jobs[1].wait_for("node 0 answers again")
    (tmp_path / "end").touch()
    assert codes(jobs) == [0, 0], texts(jobs)
    assert sorted(re.findall(r"done \d", jobs[0].out)) == ["done 0", "done 1", "done 2"]
    assert "lost" not in jobs[0].err + jobs[1].err


def test_a_run_that_ends_just_after_the_link_came_back_ends_well_everywhere(lab: Lab, tmp_path: Path) -> None:
    """TCP retransmits only after a second or more, so the leader's last message is late; the leader waits for it."""
    jobs = together(lab, *PLAIN, *PATIENT, script("until_file.py"), str(tmp_path / "end"))
    jobs[0].wait_for(READY, 3)
    lab[1].link(False)
    _silent(jobs)
    lab[1].link(True)
    (tmp_path / "end").touch()
    assert codes(jobs) == [0, 0], texts(jobs)


def test_a_link_that_stays_down_ends_the_job_everywhere(lab: Lab) -> None:
    jobs = sleepers(lab, *SHORT)
    lab[1].link(False)
    assert jobs[0].wait() == 1
    # The other side of the cut ends its workers without a message from the leader.
    until(lambda: not workers(lab[1]), LOST_AFTER + 4, "the worker beyond the cut to end")
    assert jobs[1].wait() == 1
    printed = r"node 1 \(node2\) is lost: no message from it for (\d+) s \(--node-timeout\): link or machine is down"
    assert silence(printed, jobs[0]) >= LOST_AFTER
    assert silence(r"node 0 is lost: no message from it for (\d+) s \(--node-timeout\)", jobs[1]) >= LOST_AFTER
    all_gone(lab)


def test_a_member_that_was_stopped_for_too_long_ends_when_it_is_resumed(lab: Lab) -> None:
    jobs = sleepers(lab, *SHORT)
    jobs[1].signal(signal.SIGSTOP)
    assert jobs[0].wait() == 1
    assert "node 1 (node2) is lost: no message from it" in jobs[0].err
    assert workers(lab[1])  # nothing can end them yet
    jobs[1].signal(signal.SIGCONT)
    assert jobs[1].wait() == 1
    assert "node 0 is lost" in jobs[1].err
    all_gone(lab)


def test_a_leader_that_was_stopped_for_too_long_is_lost_to_its_members(lab: Lab) -> None:
    """They cannot know that it will continue. It does, and they tell it how the run ended."""
    jobs = sleepers(lab, *SHORT)
    jobs[0].signal(signal.SIGSTOP)
    until(lambda: not workers(lab[1]), LOST_AFTER + 4, "the member's worker to end")
    assert workers(lab[0])
    jobs[0].signal(signal.SIGCONT)
    assert codes(jobs) == [1, 1], texts(jobs)
    assert silence(r"node 0 is lost: no message from it for (\d+) s", jobs[1]) >= LOST_AFTER
    assert "node 1 (node2)" in jobs[0].err, texts(jobs)
    all_gone(lab)


# -- death


@pytest.mark.parametrize("how", ["the agent", "the whole node"])
def test_a_member_that_is_killed_is_noticed_at_once(lab: Lab, how: str) -> None:
    jobs = sleepers(lab)
    if how == "the agent":
        jobs[1].signal(signal.SIGKILL)
    else:
        lab[1].kill()
    assert codes(jobs) == [1, -signal.SIGKILL]
    # Not because of its silence, which is reported differently.
    printed = "node 1 (node2) is lost: its connection closed: its agent was killed, or the machine went down"
    assert printed in jobs[0].err, texts(jobs)
    all_gone(lab)


@pytest.mark.parametrize("how", ["the agent", "the whole node"])
def test_members_end_when_the_leader_is_killed(lab: Lab, how: str) -> None:
    jobs = sleepers(lab)
    if how == "the agent":
        jobs[0].signal(signal.SIGKILL)
    else:
        lab[0].kill()
    assert codes(jobs) == [-signal.SIGKILL, 1]
    assert "node 0 is lost: the connection to the leader closed" in jobs[1].err, texts(jobs)
    all_gone(lab)


def test_a_node_that_is_lost_ends_all_the_others(lab: Lab) -> None:
    jobs = together(lab, *PLAIN, script("sleepy.py"), ranks=(1, 1, 1))
    jobs[0].wait_for(READY, 3)
    jobs[2].signal(signal.SIGKILL)
    assert codes(jobs) == [1, 1, -signal.SIGKILL]
    for job in jobs[:2]:
        assert "node 2 (node3) is lost" in job.err, texts(jobs)
    all_gone(lab)


# -- unknown clients

NUISANCE = f"""
import os, socket, time
where = ("node1", {PORT})
def say(data):
    with socket.create_connection(where, 60) as sock:
        sock.settimeout(1)
        try:
            sock.sendall(data)  # it may hang up on us before all of it is sent
            return sock.recv(1 << 16)
        except OSError:
            return b""
upgrade = (b"GET /phalanx/worker HTTP/1.1\\r\\nHost: x\\r\\nConnection: Upgrade\\r\\nUpgrade: websocket\\r\\n"
    b"Sec-WebSocket-Version: 13\\r\\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\\r\\n\\r\\n")
say(os.urandom(5000))
say(b"\\0" * 100000)
say(b"GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
say(b"POST /phalanx/worker HTTP/1.1\\r\\nContent-Length: 99999999999\\r\\n\\r\\nxxxx")
say(b"X-A: " + b"a" * 200000)
say(upgrade + os.urandom(2000))
say(upgrade + b"\\x82\\x7f\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xff" + b"a" * 1000)
many = []
for number in range(2000):
    sock = socket.create_connection(where, 60)
    if number % 2:
        sock.sendall(upgrade)
    many.append(sock)
print("done", flush=True)
time.sleep(600)
"""


def test_unknown_clients_disturb_nothing(lab: Lab, tmp_path: Path) -> None:
    """Garbage, two thousand open connections, and a node with another token, during a run."""
    jobs = together(lab, *PLAIN, script("until_file.py"), str(tmp_path / "end"))
    jobs[0].wait_for(READY, 3)
    intruder = lab[2].start(words=("sh", "-c", 'ulimit -n 4096; exec "$@"', "sh", *PYTHON, "-c", NUISANCE))
    intruder.wait_for("done")
    words = ("-n", "2", "-g", "2,1", "-i", "1", "--master", "node1", "--join-timeout", "60", script("hello.py"))
    late = lab[2].start("run", *PLAIN, *words, home="own")
    assert late.wait(90) == 1
    assert "does not know this node's token" in late.err
    (tmp_path / "end").touch()
    assert codes(jobs) == [0, 0], texts(jobs)
    for job in jobs:
        assert "Traceback" not in job.both, texts(jobs)
        assert "is lost" not in job.err, texts(jobs)
    # Not one line per unknown client. A node may note that the other was silent: on a busy machine it gets no core.
    silence = ("has not answered", "answers again")
    lines = [line for line in jobs[0].err.splitlines() if not any(part in line for part in silence)]
    assert len(lines) <= 5, texts(jobs)
    intruder.end()
    all_gone(lab)


@pytest.mark.parametrize("place", [0, 1])
def test_a_fork_server_that_is_killed_ends_the_job_everywhere(lab: Lab, place: int) -> None:
    jobs = sleepers(lab)
    (fork_server,) = [pid for pid in descendants(jobs[place].pid) if "forkserver" in command(pid)]
    os.kill(fork_server, signal.SIGKILL)
    assert codes(jobs) == [137, 137], texts(jobs)
    assert "the fork server was lost: SIGKILL" in jobs[0].err
    assert "the fork server was lost: SIGKILL" in jobs[1].err
    all_gone(lab)


@pytest.mark.warmed
def test_the_store_is_there_until_the_last_rank_of_all_nodes_has_ended(lab: Lab, tmp_path: Path) -> None:
    late = tmp_path / "late.py"
    late.write_text(
        "import time, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "if dist.get_rank() == 2:\n"
        "    time.sleep(2)  # by now all ranks of node 0 have ended\n"
        "    dist.distributed_c10d._get_default_store().set('late', 'kept')\n"
        "    print('kept', flush=True)\n"
    )
    jobs = together(lab, "--cpu", str(late))
    assert codes(jobs) == [0, 0], texts(jobs)
    assert "[2] kept" in jobs[0].out


# -- broken connections


@contextlib.contextmanager
def recording_proxy(port: int) -> Iterator[tuple[RecordingProxy, Callable[[Callable[[], None]], object]]]:
    """Run an attacker between a node and the leader at this port, in a thread; yield a function that calls it."""
    proxy, loop = RecordingProxy(), asyncio.new_event_loop()
    ready, end = threading.Event(), asyncio.Event()

    async def stand() -> None:
        async with proxy.between(port):
            ready.set()
            await end.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(stand(),))
    thread.start()
    try:
        assert ready.wait(60)
        yield proxy, loop.call_soon_threadsafe
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()
        loop.close()


def test_a_connection_that_breaks_or_is_tampered_with_is_replaced(tmp_path: Path) -> None:
    port, printed = free_port(), "connected to node 0 again: the connection had broken"
    env = {"PHALANX_TOKEN": TOKEN}
    # A loaded machine may need seconds for a connection: a third of the node timeout.
    same = (
        "run",
        *PLAIN,
        "-n",
        "2",
        "-g",
        "1,1",
        "--node-timeout",
        "90s",
        script("until_file.py"),
        str(tmp_path / "end"),
    )
    with recording_proxy(port) as (proxy, call), contextlib.ExitStack() as open_:
        jobs = [
            open_.enter_context(start(*same[:1], "-i", str(place), "--master", f"127.0.0.1:{at}", *same[1:], env=env))
            for place, at in enumerate((port, proxy.port))
        ]
        jobs[0].wait_for(READY, 2)
        call(proxy.cut)
        jobs[1].wait_for(printed, 1)
        for count, way in enumerate(("up", "down"), 2):
            call(lambda way=way: proxy.changes.update({way: True}))  # type: ignore[misc]
            jobs[1].wait_for(printed, count)
        (tmp_path / "end").touch()
        assert codes(jobs) == [0, 0], texts(jobs)
        assert "node 1 (" in jobs[0].err, texts(jobs)
        assert ") has connected again: its connection had broken" in jobs[0].err, texts(jobs)
        assert "done 1" in jobs[0].out, texts(jobs)
        assert b"ready" not in b"".join(proxy.seen) + bytes(proxy.downstream)
