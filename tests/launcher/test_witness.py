"""What a worker shows of itself, and that the script in it is none the wiser."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import signal
import subprocess
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from phalanx.diagnose.evidence import CallEvidence, Frame, GroupEvidence, ThreadStack
from phalanx.forkserver import linux
from phalanx.forkserver.probe import group_progress, movement, phases, probe, recorders, report, sampler, status_slot
from phalanx.forkserver.probe.steps import StepCounter
from phalanx.launcher.forking import fork_servers
from phalanx.launcher.workers import probes
from phalanx.launcher.workers.probes import ProbeClient, StatusBoard
from tests.kit.cli import environment, phalanx, stage

SCRIPTS = Path(__file__).parent / "scripts"
WAIT = 240  # seconds, on a busy machine


# -- one run with torch, in which rank 0 goes through all phases


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("phases")
    with stage() as env:
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
def test_the_page_says_the_phase_and_the_users_own_line(seen: dict[str, Any]) -> None:
    texts = {name: seen[name]["page"]["text"] for name in PHASES}
    assert {name: text["phase"] for name, text in texts.items()} == PHASES
    places = {name: (os.path.basename(text["place"][0]), text["place"][2]) for name, text in texts.items()}
    functions = {"data": "__getitem__", "backward": "backward", "optimizer": "step", "checkpoint": "__reduce__"}
    functions |= {"forward": "forward", "idle": "spin"}
    assert places == {name: ("phases.py", functions.get(name, "<module>")) for name in PHASES}
    assert seen["idle"]["page"]["step"] == 5  # of two optimizers that take turns, and of one that is the script's own
    assert seen["threads"] == ["MainThread", "phalanx-futures"]  # the latter is of the group, and not of the probe
    assert seen["size"] < report.MAX_BYTES


@pytest.mark.xdist_group("probe")
def test_who_sleeps_does_not_compute(seen: dict[str, Any]) -> None:
    counts = seen["sleep"]
    assert counts["slept"] > counts["spun"] == counts["before"]  # a loop of the script's own is no sleep


@pytest.mark.xdist_group("probe")
def test_a_worker_tells_what_it_waits_in(seen: dict[str, Any]) -> None:
    told = {name: msgspec.convert(one["calls"], list[CallEvidence]) for name, one in _framed(seen).items()}
    waits = {name: told[name][-1] for name in PHASES if PHASES[name] in ("join", "collective")}
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
    assert told["reduced"][-2].done
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
    """Frames travel as lists."""

    def frames(rows: list[Any]) -> list[Any]:
        return [msgspec.to_builtins(Frame(*row)) for row in rows]

    return {
        name: {
            "calls": [call | {"site": frames(call["site"])} for call in seen[name]["calls"]],
            "threads": [thread | {"frames": frames(thread["frames"])} for thread in seen[name]["threads"]],
        }
        for name in PHASES
    }


# -- an interpreter that is executed, without torch


def test_a_script_is_none_the_wiser(tmp_path: Path) -> None:
    asyncio.run(_ask_around(tmp_path))
    plain, worker, forked, fork, spawn = (
        json.loads((tmp_path / name).read_text()) for name in ("plain", "worker", "forked", "fork", "spawn")
    )
    for name in ("environ", "path", "threads"):
        assert worker[name] == plain[name], name
    assert [fd for fd in worker["fds"] if fd < 1000] == plain["fds"]
    assert worker["tasks"] == 2
    for child, kept in ((forked, 1), (fork, 1), (spawn, 0)):  # where its stacks go, if somebody asks for them
        assert child["tasks"] == 1
        assert len([fd for fd in child["fds"] if fd > 1000]) == kept
    assert not [fd for fd in json.loads((tmp_path / "executed").read_text()) if int(fd) > 1000]
    # What was opened in the place of our descriptors is still what it was.
    assert set(json.loads((tmp_path / "left").read_text())) == {os.stat(os.devnull).st_rdev}


async def _ask_around(folder: Path) -> None:
    # The same without a probe.
    look = f"import sys; sys.path[0] = {str(SCRIPTS)!r}; sys.argv[1:] = [{str(folder)!r}]; import witnessed as w; "
    clean = environment({"PYTHONDONTWRITEBYTECODE": "1"})
    subprocess.run([sys.executable, "-c", f"{look}w.child('plain')"], check=True, env=clean, timeout=WAIT)

    board = StatusBoard()
    slot = board.allocate()
    assert slot is not None
    heard: list[Any] = []
    shown = ProbeClient(board, slot, lambda message, fds: heard.append(message))
    process = _hooked(shown, "witnessed.py", folder, "-X", "dev", "-W", "error", stderr=subprocess.PIPE)
    try:
        await _until(lambda: (folder / "at told").exists() and shown.status.text.get("places", 0) > 0)
        told = await shown.ask("report", timeout=WAIT)
        assert told is not None
        main, other = told["threads"]
        assert (main["main"], main["frames"][-1][2]) == (True, "<module>")
        assert other["name"] == "the other"
        assert "wait_for" in [row[2] for row in other["frames"]]  # or in what that calls
        os.kill(process.pid, probe.SIGNAL)
        await _until(lambda: os.pread(shown.stacks, 65536, 0).count(b"wait_for") == 2)
        (folder / "told").touch()
        await _until((folder / "at closed").exists)
        before = shown.status.looks
        await _until(lambda: shown.status.looks > before + 2)
        (folder / "closed").touch()
        assert await asyncio.to_thread(process.wait, WAIT) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""  # no warning is ours
        process.stderr.close()
        assert shown.status.text["ending"]
        shown.close()
        assert board.allocate() == slot
        assert status_slot.read(board.memory, slot).looks == 0
    finally:
        process.kill()
        process.wait()
        board.close()
    assert heard == []


def test_nothing_that_a_script_does_is_taken_for_a_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_GONE", 0.3)
    asyncio.run(_look_on(tmp_path))


async def _look_on(folder: Path) -> None:
    board = StatusBoard()
    slot = board.allocate()
    assert slot is not None
    shown = ProbeClient(board, slot, lambda message, fds: None)
    process = _hooked(shown, "odd.py", folder, stdin=subprocess.PIPE)
    assert process.stdin is not None

    def go_on() -> None:
        os.write(process.stdin.fileno(), b"\n")

    async def published(more: int) -> None:
        before = shown.status.looks
        await _until(lambda: shown.status.looks >= before + more)

    try:
        # A child that ends as scripts do writes nothing on its parent's page.
        await _until((folder / "forked").exists)
        await published(7)
        (folder / "end").touch()
        child = int((folder / "child").read_text())
        await _until(lambda: linux.state(child) == "dead")
        assert "ending" not in shown.status.text
        # What cannot be answered is said, and the thread goes on.
        told = await shown.ask("listen", timeout=WAIT)
        assert told is not None
        assert "port" in told["why"]
        # Who forks more often than it is looked at, is looked at.
        before = shown.status.looks
        go_on()
        await _until((folder / "often").exists)
        assert shown.status.looks > before + 4
        assert not shown.status.text.get("signal_taken")
        go_on()
        await _until(lambda: bool(shown.status.text.get("signal_taken")))
        # Another program has no probe, and is not silent.
        assert shown.status.looked
        go_on()
        await _until((folder / "other").exists)
        await _until(lambda: not shown.status.looked)
        assert await shown.ask("report", timeout=WAIT) is None
        go_on()
        assert await asyncio.to_thread(process.wait, WAIT) == 0
        shown.close()
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        board.close()


def _hooked(shown: ProbeClient, script: str, folder: Path, *options: str, **more: Any) -> subprocess.Popen[bytes]:
    """An interpreter that begins a probe before its script."""
    clean = environment({"PYTHONDONTWRITEBYTECODE": "1"})
    hooked = {
        **clean,
        "PYTHONPATH": fork_servers._HOOK,
        "PHALANX_PROBE": ":".join(map(str, [shown.slot, *shown.fds, ""])),
    }
    if "PYTHONPATH" in clean:
        hooked |= {
            "PYTHONPATH": f"{fork_servers._HOOK}:{clean['PYTHONPATH']}",
            "PHALANX_PYTHONPATH": clean["PYTHONPATH"],
        }
    command = [sys.executable, *options, str(SCRIPTS / script), str(folder)]
    process = subprocess.Popen(command, env=hooked, pass_fds=shown.fds, **more)
    shown.handed_over()
    return process


async def _until(true: Any) -> None:
    end = time.monotonic() + WAIT
    while not true():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


# -- parts


def test_numbers_are_never_read_half_written() -> None:
    memory = mmap.mmap(-1, status_slot.SIZE)
    own = status_slot.StatusSlot(memory, 0)
    own.step(2**40, 2**40)
    child = os.fork()
    while not child:
        own.step(2**40 + 255, 2**40)
        own.step(2**40, 2**40 + 255)
    try:
        found = {status_slot.read(memory, 0).step for _ in range(30000)}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert found <= {2**40, 2**40 + 255}


def test_names_of_groups_are_looked_for_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def ask(recorder: str, *, collectives: bool) -> dict[str, Any]:
        if collectives:
            asked.append(recorder)
            time.sleep(0.001)
        status = {"last_enqueued_collective": 1, "last_completed_collective": 1}
        return {"pg_status": {str(number): status for number in range(len(asked), len(asked) + 20)}, "entries": []}

    monkeypatch.setattr(recorders, "read", ask)
    monkeypatch.setattr(recorders, "is_initialized", lambda: True)
    monkeypatch.setattr(group_progress, "names", {})
    monkeypatch.setattr(group_progress, "_next_search", 0.0)
    for _ in range(50):
        assert len(group_progress.progress()) == 20 * len(recorders.RECORDERS)
    assert len(asked) < 5


def test_a_group_that_forms_anew_has_the_name_of_the_lost_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was pending in the lost one stays so for ever, and says nothing about this one."""
    status = {
        "0": {"last_enqueued_collective": 312, "last_completed_collective": 311},
        "1": {"last_enqueued_collective": 7, "last_completed_collective": 7},
        "2": {"last_enqueued_collective": 309, "last_completed_collective": 308},
    }
    names = {"0": "0", "1": "1", "2": "0"}
    entries = [
        {
            "pg_id": int(number),
            "process_group": [name, ""],
            "profiling_name": "gloo:all_reduce",
            "collective_seq_id": status[number]["last_enqueued_collective"],
            "time_created_ns": 1,
            "retired": False,
        }
        for number, name in names.items()
    ]

    def ask(which: str, *, collectives: bool) -> dict[str, Any]:
        return {"pg_status": status, "entries": entries if collectives else []} if which == "fr" else {}

    monkeypatch.setattr(recorders, "read", ask)
    monkeypatch.setattr(recorders, "read_with_sites", lambda which: ask(which, collectives=True))
    monkeypatch.setattr(recorders, "is_initialized", lambda: True)
    monkeypatch.setattr(group_progress, "names", {})
    monkeypatch.setattr(group_progress, "_next_search", 0.0)
    assert sorted((group["name"], group["enqueued"]) for group in group_progress.progress()) == [("0", 309), ("1", 7)]
    assert sorted((call["group"], call["seq"]) for call in report.full()["calls"]) == [
        ("0", 309),
        ("1", 7),
    ]


def test_a_kernel_that_has_not_started_is_known_where_torch_times_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of coalesced collectives and messages, nor where a start is only noted with the end."""

    def entry(seq: int, start: int | None, end: int | None, **more: Any) -> dict[str, Any]:
        return {
            "pg_id": 0,
            "process_group": ["0", "default_pg"],
            "profiling_name": "nccl:all_reduce",
            "collective_seq_id": seq,
            "time_created_ns": seq,
            "time_discovered_started_ns": start,
            "time_discovered_completed_ns": end,
            "retired": end is not None,
            **more,
        }

    def started(*entries: dict[str, Any]) -> list[bool | None]:
        answer = {"pg_status": {}, "entries": list(entries)}
        monkeypatch.setattr(recorders, "read_with_sites", lambda which: answer if which == "nccl" else {})
        return [call["started"] for call in report.full()["calls"]]

    monkeypatch.setattr(recorders, "is_initialized", lambda: True)
    monkeypatch.setattr(group_progress, "names", {})
    assert started(entry(1, 5, 9), entry(2, 7, None), entry(3, None, None)) == [True, True, False]
    assert started(entry(1, None, 9), entry(2, None, None)) == [None, None]
    assert started(entry(1, 9, 9), entry(2, None, None)) == [None, None]
    message = entry(3, None, None, is_p2p=True, profiling_name="nccl:send")
    assert started(entry(1, 5, 9), entry(2, None, None), entry(2, None, None), message) == [True, None, None, None]


def test_who_looks_for_the_compiler_while_calls_are_named_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = types.ModuleType("torch")
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch._inductor", types.SimpleNamespace(config="of the compiler"))
    with recorders.without_compiler():
        standin = torch.__dict__["_inductor"]
        assert standin.codecache.PyCodeCache.stack_frames_for_code("x") is None
        with ThreadPoolExecutor(1) as another:
            assert another.submit(lambda: standin.config).result() == "of the compiler"
    assert "_inductor" not in torch.__dict__


def test_a_page_that_is_half_written_says_nothing() -> None:
    memory = memoryview(bytearray(2 * status_slot.SIZE))
    own = status_slot.StatusSlot(memory, 1)
    own.write({"phase": "data", "place": ["x" * status_slot.SIZE, 1, "f"]})
    assert status_slot.read(memory, 1).text == {"phase": "data", "cut": True}
    own.write({"phase": "idle"})
    status_slot._TEXT.pack_into(memory, status_slot.SIZE + status_slot._TEXT_AT, 5, 16)
    assert status_slot.read(memory, 1).text == {}
    assert status_slot.read(memory, 0).looks == 0


@pytest.mark.parametrize(
    ("turns", "steps"),
    [
        ("aaaa", 4),
        ("abab", 2),
        ("abbbbbabbbbbabbbbb", 12),  # five of one, one of the other: the busier one counts
        ("aaabbbbbbbb", 7),  # the first is no longer used
        ("".join(chr(97 + number) for number in range(9)) * 3, 3),  # one for each parameter
    ],
)
def test_steps_are_those_of_one_optimizer(turns: str, steps: int) -> None:
    memory = memoryview(bytearray(status_slot.SIZE))
    counted = StepCounter(status_slot.StatusSlot(memory, 0))
    for name in turns:
        counted._stepped(ord(name))
    assert status_slot.read(memory, 0).step == steps


@pytest.mark.parametrize(
    ("path", "name", "phase"),
    [
        ("_dynamo/convert_frame.py", "_compile", "compile"),
        ("_dynamo/eval_frame.py", "compile_wrapper", ""),
        ("_inductor/compile_fx.py", "compile_fx", "compile"),
        ("_inductor/runtime/triton_heuristics.py", "run", ""),
        ("_inductor/runtime/triton_heuristics.py", "autotune_to_one_config", "compile"),
        ("distributed/distributed_c10d.py", "get_rank", ""),
        ("distributed/distributed_c10d.py", "all_gather_object", "collective"),
        ("distributed/distributed_c10d.py", "_store_based_barrier", "join"),
        ("distributed/checkpoint/state_dict_saver.py", "save", "checkpoint"),
        ("amp/grad_scaler.py", "step", "optimizer"),
        ("utils/checkpoint.py", "checkpoint", ""),
    ],
)
def test_a_file_of_torch_has_a_phase(path: str, name: str, phase: str) -> None:
    assert phases._of_torch(path, name) == phase


def test_the_signal_of_a_probe_is_no_one_elses() -> None:
    assert signal.SIGRTMIN < probe.SIGNAL < signal.SIGRTMAX


def test_a_thread_moves_by_its_place_or_by_what_is_counted() -> None:
    moving = movement.Movement()
    assert moving.still == 0.0
    assert moving.update((1, 2, 3), (0,), 100)
    assert moving.stays((1, 2, 3))
    assert not moving.update((1, 2, 3), (0,), 200)
    assert moving.update((1, 2, 3), (1,), 300)  # a step later
    assert moving.update((1, 4, 3), (1,), 400)
    assert (moving.moves, moving.moved, moving.places) == (3, 400, 2)


def test_batches_of_a_loader_are_counted() -> None:
    text = "class Loader:\n    _num_yielded = 7\n    def __next__(self):\n        return look()\n"
    names: dict[str, Any] = {"look": lambda: sampler._batches(sys._getframe())}
    exec(compile(text, "/x/torch/utils/data/dataloader.py", "exec"), names)
    assert next(names["Loader"]()) == 7
    assert sampler._batches(sys._getframe()) == 0
