"""The probe in a worker: what it reports, and that the script does not notice it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from phalanx.diagnose.evidence import CallEvidence, Frame, GroupEvidence, ThreadStack
from phalanx.forkserver import linux
from phalanx.forkserver.board import status_slot
from phalanx.forkserver.probe import probe, report
from phalanx.launcher.forking import fork_servers
from phalanx.launcher.workers import probes
from phalanx.launcher.workers.probes import ProbeClient, StatusBoard
from tests.kit.cli import environment, phalanx, warm_environment

SCRIPTS = Path(__file__).parent / "scripts"
WAIT = 240  # seconds, on a busy machine


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("phases")
    with warm_environment() as env:
        done = phalanx("run", "-g", "2", "--cpu", str(SCRIPTS / "phases.py"), str(folder), env=env, timeout=240)
    assert done.code == 0, done.out + done.err
    found: dict[str, Any] = json.loads((folder / "seen.json").read_text())
    return found


PHASES = {
    "join": "join",
    "reduced": "collective",
    "received": "collective",
    "monitored": "collective",
    "bucket": "collective",
    "work": "collective",
    "shm reduced": "collective",
    "shm work": "collective",
    "shm bucket": "collective",
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "checkpoint": "checkpoint",
    "idle": "idle",
}


@pytest.mark.xdist_group("probe")
def test_the_status_slot_has_the_phase_and_the_line_of_the_user(seen: dict[str, Any]) -> None:
    texts = {name: seen[name]["page"]["text"] for name in PHASES}
    assert {name: text["phase"] for name, text in texts.items()} == PHASES
    places = {name: (os.path.basename(text["place"][0]), text["place"][2]) for name, text in texts.items()}
    functions = {"data": "__getitem__", "backward": "backward", "optimizer": "step", "checkpoint": "__reduce__"}
    functions |= {"forward": "forward", "idle": "spin"}
    assert places == {name: ("phases.py", functions.get(name, "<module>")) for name in PHASES}
    assert seen["idle"]["page"]["step"] == 5  # two optimizers that alternate, and one that the script defines
    assert seen["threads"] == ["MainThread", "phalanx-futures"]  # the second belongs to the group, not to the probe
    assert seen["size"] < report.MAX_BYTES


@pytest.mark.xdist_group("probe")
def test_sleep_does_not_count_as_compute(seen: dict[str, Any]) -> None:
    counts = seen["sleep"]
    assert counts["slept"] > counts["spun"] == counts["before"]  # a loop of the script does not count as sleep


@pytest.mark.xdist_group("probe")
def test_the_report_has_the_pending_calls(seen: dict[str, Any]) -> None:
    answers = {name: msgspec.convert(one["calls"], list[CallEvidence]) for name, one in _framed(seen).items()}
    waits = {name: answers[name][-1] for name in PHASES if PHASES[name] in ("join", "collective")}
    assert {name: call.op for name, call in waits.items()} == {
        "join": "init_process_group",
        "reduced": "all_reduce",
        "received": "recv",
        "monitored": "monitored_barrier",
        "bucket": "all_reduce",
        "work": "broadcast",
        "shm reduced": "all_reduce",
        "shm work": "broadcast",
        "shm bucket": "all_reduce",
    }
    assert not any(call.done for call in waits.values())
    reduced = waits["reduced"]
    assert (reduced.reduction, reduced.shapes, reduced.dtypes, reduced.seq) == ("MAX", ((3, 4),), ("float32",), 2)
    assert answers["reduced"][-2].done
    ours = waits["shm reduced"]
    assert (ours.reduction, ours.shapes, ours.dtypes, ours.seq) == ("MAX", ((3, 4),), ("float32",), 2)
    assert (waits["shm work"].root, waits["shm work"].seq) == (1, 3)
    assert any(frame.function == "_engine_run_backward" for frame in waits["shm bucket"].site)
    received = waits["received"]
    assert (received.peer, received.tag, received.group, received.shapes) == (1, 5, "1", ((3, 4),))
    assert all(any(frame.file.endswith("phases.py") for frame in call.site) for call in waits.values())
    groups = {group.name: group for group in msgspec.convert(seen["work"]["groups"], list[GroupEvidence])}
    assert groups["1"].ranks == (0, 1)
    assert groups["1"].backend == "gloo"
    assert groups["0"].enqueued == groups["0"].completed + 1 == waits["work"].seq
    last = {group.name: group for group in msgspec.convert(seen["shm bucket"]["groups"], list[GroupEvidence])}["2"]
    assert (last.backend, last.ranks, last.enqueued) == ("shm", (0, 1), waits["shm bucket"].seq)
    assert last.completed == last.enqueued - 1
    main, *others = msgspec.convert(_framed(seen)["work"]["threads"], list[ThreadStack])
    assert main.main
    assert main.frames[0].file.endswith("phases.py")
    assert [thread.name for thread in others] == ["watch work"]


def _framed(seen: dict[str, Any]) -> dict[str, Any]:
    """Convert calls and threads back to objects; their frames are sent as lists."""

    def frames(rows: list[Any]) -> list[Any]:
        return [msgspec.to_builtins(Frame(*row)) for row in rows]

    return {
        name: {
            "calls": [call | {"site": frames(call["site"])} for call in seen[name]["calls"]],
            "threads": [thread | {"frames": frames(thread["frames"])} for thread in seen[name]["threads"]],
        }
        for name in PHASES
    }


def test_a_script_does_not_notice_its_probe(tmp_path: Path) -> None:
    asyncio.run(_observe_probed_script(tmp_path))
    plain, worker, forked, fork, spawn = (
        json.loads((tmp_path / name).read_text()) for name in ("plain", "worker", "forked", "fork", "spawn")
    )
    for name in ("environ", "path", "threads"):
        assert worker[name] == plain[name], name
    assert [fd for fd in worker["fds"] if fd < 1000] == plain["fds"]
    assert worker["tasks"] == 2
    for child, kept in ((forked, 1), (fork, 1), (spawn, 0)):  # its stacks are written there on request
        assert child["tasks"] == 1
        assert len([fd for fd in child["fds"] if fd > 1000]) == kept
    assert not [fd for fd in json.loads((tmp_path / "executed").read_text()) if int(fd) > 1000]
    # Descriptors that were opened with the numbers of ours are unchanged.
    assert set(json.loads((tmp_path / "left").read_text())) == {os.stat(os.devnull).st_rdev}


async def _observe_probed_script(folder: Path) -> None:
    # The same script without a probe.
    look = f"import sys; sys.path[0] = {str(SCRIPTS)!r}; sys.argv[1:] = [{str(folder)!r}]; import probed as w; "
    clean = environment({"PYTHONDONTWRITEBYTECODE": "1"})
    subprocess.run([sys.executable, "-c", f"{look}w.child('plain')"], check=True, env=clean, timeout=WAIT)

    board = StatusBoard()
    slot = board.allocate()
    assert slot is not None
    messages: list[Any] = []
    client = ProbeClient(board, slot, lambda message, fds: messages.append(message))
    process = _hooked(client, "probed.py", folder, "-X", "dev", "-W", "error", stderr=subprocess.PIPE)
    try:
        await _until(lambda: (folder / "at reported").exists() and client.status.text.get("places", 0) > 0)
        answers = await client.ask("report", timeout=WAIT)
        assert answers is not None
        main, other = answers["threads"]
        assert (main["main"], main["frames"][-1][2]) == (True, "<module>")
        assert other["name"] == "the other"
        assert "wait_for" in [row[2] for row in other["frames"]]  # or in a function that it calls
        os.kill(process.pid, probe.SIGNAL)
        await _until(lambda: os.pread(client.stacks, 65536, 0).count(b"wait_for") == 2)
        (folder / "reported").touch()
        await _until((folder / "at closed").exists)
        before = client.status.looks
        await _until(lambda: client.status.looks > before + 2)
        (folder / "closed").touch()
        assert await asyncio.to_thread(process.wait, WAIT) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""  # the probe prints no warning
        process.stderr.close()
        assert client.status.text["ending"]
        client.close()
        assert board.allocate() == slot
        assert status_slot.read(board.memory, slot).looks == 0
    finally:
        process.kill()
        process.wait()
        board.close()
    assert messages == []


def test_forks_and_execs_of_a_script_are_not_stalls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_GONE", 0.3)
    asyncio.run(_observe_forking_script(tmp_path))


async def _observe_forking_script(folder: Path) -> None:
    board = StatusBoard()
    slot = board.allocate()
    assert slot is not None
    client = ProbeClient(board, slot, lambda message, fds: None)
    process = _hooked(client, "forking.py", folder, stdin=subprocess.PIPE)
    assert process.stdin is not None

    def resume() -> None:
        os.write(process.stdin.fileno(), b"\n")

    async def published(more: int) -> None:
        before = client.status.looks
        await _until(lambda: client.status.looks >= before + more)

    try:
        # A child that exits normally writes nothing to the status slot of its parent.
        await _until((folder / "forked").exists)
        await published(7)
        (folder / "end").touch()
        child = int((folder / "child").read_text())
        await _until(lambda: linux.state(child) == "dead")
        assert "ending" not in client.status.text
        # A request that cannot be answered gets the reason, and the thread continues.
        answers = await client.ask("listen", timeout=WAIT)
        assert answers is not None
        assert "port" in answers["why"]
        # A script that forks more often than it is sampled is still sampled.
        before = client.status.looks
        resume()
        await _until((folder / "often").exists)
        assert client.status.looks > before + 4
        assert not client.status.text.get("signal_taken")
        resume()
        await _until(lambda: bool(client.status.text.get("signal_taken")))
        # Another program has no probe, and does not count as silent.
        assert client.status.looked
        resume()
        await _until((folder / "other").exists)
        await _until(lambda: not client.status.looked)
        assert await client.ask("report", timeout=WAIT) is None
        resume()
        assert await asyncio.to_thread(process.wait, WAIT) == 0
        client.close()
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        board.close()


def _hooked(client: ProbeClient, script: str, folder: Path, *options: str, **more: Any) -> subprocess.Popen[bytes]:
    """Start an interpreter that starts a probe before its script."""
    clean = environment({"PYTHONDONTWRITEBYTECODE": "1"})
    hooked = {
        **clean,
        "PYTHONPATH": fork_servers._HOOK,
        "PHALANX_PROBE": ":".join(map(str, [client.slot, *client.fds, ""])),
    }
    if "PYTHONPATH" in clean:
        hooked |= {
            "PYTHONPATH": f"{fork_servers._HOOK}:{clean['PYTHONPATH']}",
            "PHALANX_PYTHONPATH": clean["PYTHONPATH"],
        }
    command = [sys.executable, *options, str(SCRIPTS / script), str(folder)]
    process = subprocess.Popen(command, env=hooked, pass_fds=client.fds, **more)
    client.handed_over()
    return process


async def _until(true: Any) -> None:
    end = time.monotonic() + WAIT
    while not true():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


def test_the_signal_of_the_probe_is_a_realtime_signal() -> None:
    assert signal.SIGRTMIN < probe.SIGNAL < signal.SIGRTMAX
