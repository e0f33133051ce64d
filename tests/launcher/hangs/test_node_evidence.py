"""Information about processes from outside: stacks that they write on a signal, and states from the kernel."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from phalanx.diagnose.evidence import Evidence, Frame, GroupEvidence, NodeFacts, Process, Rank, ThreadStack, decode
from phalanx.diagnose.verdict import Verdict
from phalanx.forkserver import linux, wire
from phalanx.forkserver.probe import probe
from phalanx.launcher.evidence import evidence_reply, stacks, stall_dump
from phalanx.launcher.hangs import node_evidence
from phalanx.launcher.hangs.progress_tracker import ProgressTracker, RankProgress
from phalanx.launcher.remote import foreign_job
from phalanx.launcher.telemetry import process_stats
from tests.kit.cli import until

HANGING = """
import faulthandler, sys, threading, time
faulthandler.register({signal}, file={fd}, all_threads=True, chain=False)
def waits():
    time.sleep(1000)
threading.Thread(target=waits, daemon=True).start()
def spins():
    print("ready", flush=True)
    sum(range(10**12))
spins()
"""


def test_stacks_come_while_the_lock_of_python_is_held() -> None:
    fd = os.memfd_create("stacks")
    code = HANGING.format(signal=int(probe.SIGNAL), fd=fd)
    with subprocess.Popen([sys.executable, "-c", code], pass_fds=(fd,), stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            for _ in range(2):  # the file is rewritten each time
                text = asyncio.run(stacks.written(fd, lambda: stacks.send_signal(process.pid, probe.SIGNAL), 20.0))
                other, main = stacks.parsed(text)
                assert (main.main, main.frames[0].function) == (True, "spins")
                assert main.frames[0].line in (8, 9)  # it may not have reached the next line yet
                assert (other.main, other.frames[0].function) == (False, "waits")
        finally:
            process.kill()
            os.close(fd)


def test_which_thread_holds_the_gil() -> None:
    """The main thread, or if that waits for the GIL, the only one that does not wait."""
    main = ThreadStack(name="MainThread", frames=(Frame("train.py", 9, "step"),), main=True)
    spins = ThreadStack(name="logger", frames=(Frame("log.py", 5, "write"),))
    waits = ThreadStack(name="other", frames=(Frame("/usr/lib/python3.12/threading.py", 327, "wait"),))
    for wakes, threads, names in (
        (False, (spins, waits, main), ["MainThread"]),
        (True, (spins, waits, main), ["logger"]),
        (True, (waits, main), []),
        (True, (spins, replace(spins, name="another"), main), []),
    ):
        assert [each.name for each in node_evidence.holder(threads, waits=wakes) if each.holds_gil] == names


def test_a_rank_that_has_answered_is_not_silent() -> None:
    tracker = ProgressTracker((0, 0), 30.0)
    tracker.update(1.0, [RankProgress(rank=0, silent=60.0)])
    main = ThreadStack(name="MainThread", frames=(Frame("train.py", 9, "step"),), main=True)
    assert tracker.complete(Rank(rank=0, node=0, threads=(main,))).silent == 0.0
    assert tracker.complete(Rank(rank=0, node=0, threads=(main,), note="it has not answered")).silent == 60.0


def test_answers_of_nodes_that_are_mixed() -> None:
    """In srun's output: whole lines, in any order."""
    ranks = tuple(Rank(rank=number, node=0, note="x" * 3000) for number in range(2))
    answers = [Evidence(time=1.0, waited=0.0, ranks=(rank,)) for rank in ranks]
    here = os.uname().nodename
    lines = [
        [line.replace(here, f"host{number}") for line in foreign_job.encode_lines(each).splitlines()]
        for number, each in enumerate(answers)
    ]
    mixed = ["a word of the prolog's", *(line for pair in zip(*lines, strict=True) for line in pair)]
    assert foreign_job.decode_lines("\n".join(mixed)) == answers
    assert foreign_job.decode_lines("\n".join(mixed[:-2])) == []  # invalid lines are left out


def test_a_worker_that_is_forgotten_meanwhile_costs_no_other_file_its_contents(tmp_path: Path) -> None:
    """The descriptor of its stacks may then be that of a log."""
    fd = os.memfd_create("stacks")
    log = tmp_path / "log"
    log.write_text("what a rank has written")

    def forgotten() -> None:
        with log.open("rb+") as file:
            os.dup2(file.fileno(), fd)

    try:
        assert asyncio.run(stacks.written(fd, forgotten, 0.05)) == ""
    finally:
        os.close(fd)
    assert asyncio.run(stacks.written(-1, forgotten, 0.05)) == ""
    assert log.read_text() == "what a rank has written"


def test_names_that_are_no_text() -> None:
    code = r"import ctypes; ctypes.CDLL(None).prctl(15, b'tr\xc3'); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        seen = process_stats.describe(process.pid, process_stats.ProcessStatsReader().read(process.pid), [])
        process.kill()
    assert seen.resident > 0
    reply = evidence_reply.read({"threads": [{"name": "MainThread", "frames": [["/a/\udcff.py", 3, "f"]]}]})
    assert msgspec.json.encode(reply)


def test_a_process_without_a_handler_gets_no_signal() -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        assert not stacks.send_signal(process.pid, probe.SIGNAL)
        assert process.poll() is None
        process.kill()
    assert not stacks.send_signal(process.pid, probe.SIGNAL)  # it has ended


def test_threads_of_ours_are_left_out() -> None:
    text = """\
Thread 0x00007f12 [feeder] (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/usr/lib/python3.11/threading.py", line ??? in _bootstrap

Thread 0x00007f13 (most recent call first):
  File "/phalanx/forkserver/probe/probe.py", line 60 in _watch

Current thread 0x00007f14 (most recent call first):
  File "/home/me/train.py", line 7 in <module>
  File "/phalanx/forkserver/warm_main.py", line 29 in <module>
"""
    feeder, main = stacks.parsed(text)
    assert (feeder.name, [frame.line for frame in feeder.frames], feeder.main) == ("feeder", [327, 0], False)
    assert (main.name, [frame.file for frame in main.frames], main.main) == ("MainThread", ["/home/me/train.py"], True)
    assert stacks.parsed("") == ()
    (child,) = stacks.parsed(text.partition("\n\n")[2], name="process 7 pt_data_worker")
    assert (child.name, child.main) == ("process 7 pt_data_worker", False)


def test_two_looks_at_once_make_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_stats, "_SHORTEST", 600.0)
    looks = process_stats.ProcessStatsReader()
    looks.read(os.getpid())
    sum(range(100_000))
    found = looks.read(os.getpid())
    assert found.cpu == 0
    assert found.resident > 1 << 20


def test_the_kernel_shows_which_processes_compute_are_stopped_or_have_children() -> None:
    looks = process_stats.ProcessStatsReader()
    command = (
        "import subprocess, sys; child = subprocess.Popen(['sleep', '1000']); print(child.pid, flush=True)\nwhile 1: 1"
    )
    with subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE) as process:
        child = 0
        try:
            assert process.stdout is not None
            child = int(process.stdout.readline())
            looks.read(process.pid)
            until(lambda: looks.read(process.pid).cpu > 0.5, 20, "it to be seen at work")
            found = process_stats.describe(
                process.pid, looks.read(process.pid), linux.families([process.pid])[process.pid]
            )
            assert found.state == "R"
            assert found.resident > 1 << 20
            assert found.threads == 1
            assert found.children == (f"{child} S sleep 1000",)
            process.send_signal(signal.SIGSTOP)
            until(lambda: looks.read(process.pid).state == "T", 10, "it to be stopped")
        finally:
            process.kill()
            if child:
                os.kill(child, signal.SIGKILL)
    assert looks.read(process.pid).state == "X"


def test_unread_bytes_of_a_socket_are_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sock:
        other, _ = listener.accept()
        sock.setblocking(False)
        with other:
            with contextlib.suppress(BlockingIOError):
                while True:
                    sock.send(bytes(1 << 16))
            found = process_stats.describe(os.getpid(), process_stats.ProcessStats("S"), [])
            assert found.sockets >= 2
            assert found.unsent > 0


def test_reports_of_a_rank_are_parsed() -> None:
    frame = ["train.py", 7, "step"]
    reply = evidence_reply.read(
        {
            "is": "answer",
            "threads": [{"name": "MainThread", "main": True, "frames": [frame]}],
            "groups": [{"name": "0", "backend": "gloo", "ranks": [0, 1], "enqueued": 4, "completed": 3}],
            "calls": [{"group": "0", "seq": 4, "op": "all_reduce", "shapes": [[4]], "site": [frame]}],
        }
    )
    assert reply.threads[0].frames == reply.calls[0].site
    assert (reply.calls[0].site[0].file, reply.groups[0].ranks) == ("train.py", (0, 1))


def test_a_stall_is_kept_whole_or_not_at_all(tmp_path: Path) -> None:
    process = Process(pid=5, state="T")
    evidence = Evidence(time=1.0, waited=3.0, ranks=(Rank(rank=1, node=0, process=process, note="it is stopped"),))
    verdict = Verdict(kind="stopped", ranks=(1,), text="rank 1 is stopped")
    path = Path(stall_dump.write(str(tmp_path), 1, evidence, [verdict]))
    assert decode((path / "evidence.json").read_bytes()) == evidence
    assert "rank 1 on node 0, process 5 (T): it is stopped" in (path / "stacks.txt").read_text()
    assert [entry.name for entry in tmp_path.iterdir()] == ["stall_1"]
    assert stall_dump.write(str(tmp_path / "missing"), 1, evidence, [verdict]) == ""
    (tmp_path / "stall_2").write_text("a file is in the way")
    assert stall_dump.write(str(tmp_path), 2, evidence, [verdict]) == ""
    assert not list(tmp_path.glob("*.part"))


def test_a_message_in_parts_does_not_block() -> None:
    messages = [{"is": "answer", "text": "x" * 1000}, {"is": "received"}]
    left, right = socket.socketpair()
    with left, right:
        for message in messages:
            wire.send(left, message)
        whole = right.recv(1 << 16)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        reader = wire.MessageReader()
        found = []
        for byte in whole:
            theirs.send(bytes([byte]))
            with contextlib.suppress(BlockingIOError):
                found.append(reader.receive(ours))
        assert found == [(message, []) for message in messages]
        theirs.close()
        assert reader.receive(ours) is None


def test_a_group_of_all_ranks_does_not_list_them() -> None:
    """Otherwise each of thousands of ranks would send all of them to the leader."""
    groups = (
        GroupEvidence(name="0", backend="gloo", ranks=(0, 1, 2, 3), enqueued=7),
        GroupEvidence(name="1", backend="gloo", ranks=(0, 1)),
    )
    ranks = (Rank(rank=0, node=0, groups=groups), Rank(rank=1, node=0, groups=groups[1:]))
    found = node_evidence.without_listing_all(
        node_evidence.NodeEvidence(node=NodeFacts(node=0, host="a"), ranks=ranks), 4
    )
    assert [[group.ranks for group in rank.groups] for rank in found.ranks] == [[(), (0, 1)], [(0, 1)]]
    assert found.ranks[0].groups[0].enqueued == 7
