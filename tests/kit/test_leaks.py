"""Each kind of leak is made on purpose once, and must fail its test with a message that describes it."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kit import leaks
from tests.kit.cli import python

pytest_plugins = ["pytester"]

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

CONFTEST = """
from tests.kit import leaks
leaks.GRACE = leaks.LONGER = 0.3
"""

LEAKING = """
import os, signal, socket, subprocess, sys, tempfile, threading, time

import pytest

kept = []
stop = threading.Event()

def test_process():
    kept.append(subprocess.Popen(["sleep", "61"]))

def test_daemon():
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 3)
            os.write(write, b"x")
            os.execvp("sleep", ["sleep", "62"])
        os._exit(0)
    os.close(write)
    os.read(read, 1)
    os.close(read)
    os.wait()

def test_tree():
    kept.append(subprocess.Popen("sleep 63 & sleep 64 & exec sleep 65", shell=True))

def test_server():
    code = "import socket, time; s = socket.create_server(('', 0)); print('up', flush=True); time.sleep(66)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    child.stdout.readline()
    child.stdout.close()
    kept.append(child)

def test_shm():
    open(f"/dev/shm/kit-leak-{os.getpid()}", "w").close()

def test_tmp():
    tempfile.mkdtemp(prefix="torchelastic_")

def test_tmp_of_a_child():
    subprocess.run([sys.executable, "-c", "import tempfile; tempfile.mkdtemp(prefix='phalanx-')"])

def test_socket():
    kept.append(socket.create_server(("127.0.0.1", 0)))

def test_fd():
    kept.append(os.open("/etc/passwd", os.O_RDONLY))

def test_thread():
    threading.Thread(target=stop.wait, args=(20,), name="left-over", daemon=True).start()

def test_variable():
    os.environ["KIT_LEAK"] = "1"

def test_variable_gone():
    del os.environ["PATH"]

def test_handler():
    signal.signal(signal.SIGUSR1, lambda *_: None)

def test_mask():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])

def test_cwd():
    os.chdir("/")

def test_umask():
    os.umask(0o007)

def test_clean_after_all_that():
    stop.set()

def test_nothing_but_failed():
    assert False, "failed by itself"
"""

WORDS = {
    "process": r"leaked process \d+: sleep 61\b",
    "daemon": r"leaked process \d+: sleep 62\b",
    "tree": r"leaked process \d+: sleep 63\b(?s:.*)sleep 65|leaked process \d+: sleep 65\b(?s:.*)sleep 63",
    "server": r"leaked process \d+: .*, listening on port \d+",
    "shm": r"leaked shared memory /dev/shm/kit-leak-\d+",
    "tmp": r"leaked temporary file torchelastic_",
    "tmp_of_a_child": r"leaked temporary file phalanx-",
    "socket": r"leaked listening socket: fd \d+, port \d+",
    "fd": r"leaked fd \d+: /etc/passwd",
    "thread": r"leaked thread 'left-over'",
    "variable": r"leaked environment variable KIT_LEAK: was None, is '1'",
    "variable_gone": r"leaked environment variable PATH: was '.+', is None",
    "handler": r"leaked signal handler of SIGUSR1: was",
    "mask": r"leaked signal handler of the mask: .*SIGUSR2",
    "cwd": r"leaked working directory: was .+, is /",
    "umask": r"leaked umask: was \d+, is 007",
}

CLEAN = """
import gc, multiprocessing, os, signal, socket, subprocess, tempfile, threading
from multiprocessing import shared_memory

import pytest

def test_places():
    assert os.environ["TMPDIR"] == tempfile.gettempdir()
    assert os.environ["PHALANX_HOME"].startswith(os.path.dirname(os.environ["TMPDIR"]))
    assert not os.path.exists(os.environ["PHALANX_HOME"])
    os.makedirs(os.environ["PHALANX_HOME"])
    test_places.seen = os.environ["TMPDIR"], os.environ["PHALANX_HOME"]
    with tempfile.TemporaryDirectory(), socket.create_server(("127.0.0.1", 0)):
        thread = threading.Thread(target=print)
        thread.start()
        thread.join()

def test_places_are_of_this_test_only():
    assert os.environ["TMPDIR"] not in test_places.seen
    assert os.environ["PHALANX_HOME"] not in test_places.seen
    assert not any(map(os.path.exists, test_places.seen))

def test_foreign_variables_are_gone():
    assert not {"RANK", "PET_ROLE", "SLURM_JOB_ID", "OMP_NUM_THREADS"} & os.environ.keys()

def test_monkeypatch(monkeypatch, tmp_path):
    monkeypatch.setenv("KIT_LEAK", "1")
    monkeypatch.chdir(tmp_path)

def test_dead_child_not_waited_for():
    if os.fork() == 0:
        os._exit(0)

def test_child_that_is_just_ending():
    subprocess.Popen(["sleep", "0.1"])

def test_thread_that_is_just_ending():
    threading.Timer(0.1, print).start()

def test_socket_in_a_cycle():
    cycle = [socket.create_server(("127.0.0.1", 0))]
    cycle.append(cycle)

def test_helpers_of_multiprocessing():
    memory = shared_memory.SharedMemory(create=True, size=10)
    memory.close()
    memory.unlink()
    process = multiprocessing.get_context("forkserver").Process(target=print)
    process.start()
    process.join()
    process.close()

@pytest.mark.leaves("tmp:pymp-*", "process:sleep 0.*", why="a test of the mark")
def test_mark():
    tempfile.mkdtemp(prefix="pymp-")
    subprocess.Popen(["sleep", "0.5"])
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.Pytester]:
    monkeypatch.setenv("PYTHONPATH", ROOT)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name in ("RANK", "PET_ROLE", "SLURM_JOB_ID", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    pytester.makeconftest(CONFTEST)
    return pytester


def test_every_leak_fails_its_test_and_no_other(suite: pytest.Pytester) -> None:
    suite.makepyfile(LEAKING)
    result = suite.runpytest_subprocess("-p", "tests.kit.plugin", "--tb=short", "-rA")
    result.assert_outcomes(passed=len(WORDS) + 1, failed=1, errors=len(WORDS))
    sections = re.split(r"_+ ERROR at teardown of test_(\w+) _+\n", result.stdout.str().split("= FAILURES =")[0])
    reports = dict(zip(sections[1::2], sections[2::2], strict=True))
    assert reports.keys() == WORDS.keys()
    for name, words in WORDS.items():
        assert re.search(words, reports[name]), f"{name}: {reports[name]}"
        # Another test may have killed a process that had a semaphore: after 0.3 s, its file may still be there.
        lines = re.findall("^(?:E +)?leaked (?!shared memory /dev/shm/sem).*", reports[name], re.M)
        assert len(lines) == (3 if name == "tree" else 1), f"{name}: {lines}"
    for path in re.findall("leaked shared memory (/dev/shm/kit-leak-[0-9]+)", reports["shm"])[:1]:
        os.unlink(path)


def test_tests_without_leaks_pass(suite: pytest.Pytester) -> None:
    suite.makepyfile(CLEAN)
    result = suite.runpytest_subprocess("-p", "tests.kit.plugin", "--strict-markers")
    result.assert_outcomes(passed=CLEAN.count("def test_"))


@pytest.fixture
def asked() -> Iterator[Callable[[str], bool]]:
    """Ask an unrelated process whether foreign processes use the file."""

    def held(path: str) -> bool:
        ask = f"from tests.kit import state; print(state.held_by_others({path!r}))"
        return {"True": True, "False": False}[python("-c", ask, env={"PYTHONPATH": ROOT}).out.strip()]

    return held


def test_shared_memory_of_a_foreign_process_is_not_ours(asked: Callable[[str], bool]) -> None:
    path = f"/dev/shm/kit-foreign-{os.getpid()}"
    with open(path, "wb+") as file:
        try:
            file.truncate(10)
            assert asked(path)
            with mmap.mmap(file.fileno(), 10):
                file.close()
                assert asked(path)
            assert not asked(path)
        finally:
            os.unlink(path)


def test_a_semaphore_of_a_foreign_process_is_not_ours(asked: Callable[[str], bool]) -> None:
    lock = multiprocessing.get_context("spawn").Lock()
    assert asked(f"/dev/shm/sem.{lock._semlock.name[1:]}")


def test_cleaning_removes_nothing_from_shared_memory(tmp_path: Path) -> None:
    # The creator of a file there is not certain, and a running job would lose its semaphores.
    path = f"/dev/shm/kit-kept-{os.getpid()}"
    before = leaks.Before(str(tmp_path))
    with open(path, "w"):
        pass
    try:
        before.clean([leaks.Leak("shm", os.path.basename(path), path)])
        assert os.path.exists(path)
    finally:
        os.unlink(path)
