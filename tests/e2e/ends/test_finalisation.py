"""A worker finalizes a script like plain Python: in the same order, up to the last byte."""

from __future__ import annotations

import gzip
import zipfile
from pathlib import Path

import pytest

from tests.e2e.places import SCRIPTS, script
from tests.kit.cli import phalanx, python, warm_environment

pytestmark = pytest.mark.xdist_group("finalisation")  # they share a warm fork server

WAYS = ("cold", "fresh", "warm")
KINDS = {"plain": (), "torch": ("torch", "atexit"), "an error": ("torch", "raise"), "a code": ("exit",)}


def run(way: str, name: str, *args: str, cwd: str | None = None) -> int:
    command = ("run", "-g", "1", "--cpu", *(("--fresh",) if way == "fresh" else ()), name, *args)
    if way != "warm":
        return phalanx(*command, cwd=cwd).code
    with warm_environment() as env:
        return phalanx(*command, env=env, cwd=cwd).code


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, list[str]]]:
    """Return what plain Python does with the same script, for each way to end."""
    found = {}
    for kind, words in KINDS.items():
        folder = tmp_path_factory.mktemp("plain")
        result = python(script("finalisation.py"), str(folder / "out"), *words, cwd=str(SCRIPTS))
        found[kind] = (result.code, (folder / "out").read_text().splitlines())
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_everything_is_finalized(
    tmp_path: Path, way: str, kind: str, expected: dict[str, tuple[int, list[str]]]
) -> None:
    code, lines = expected[kind]
    assert run(way, "finalisation.py", str(tmp_path / "out"), *KINDS[kind], cwd=str(SCRIPTS)) == code
    printed = (tmp_path / "out").read_text().splitlines()
    assert sorted(printed) == sorted(lines)
    # Python calls finalizers in the order of its collector, which depends on other objects.
    ordered = [line for line in lines if not line.startswith("del ")]
    assert [line for line in printed if not line.startswith("del ")] == ordered
    assert (tmp_path / "memory.log").read_text() == "".join(f"step {step}\n" for step in range(5))
    assert not [*tmp_path.glob("temporary*"), *tmp_path.glob("directory*")]


FILES = """
import gzip, os, sys, tempfile, zipfile
log = open("log.csv", "w")
zipped = gzip.open("log.gz", "wt")
archive = zipfile.ZipFile("log.zip", "w")
temporary = tempfile.NamedTemporaryFile(dir=".", prefix="temporary")
class Summary:
    def __init__(self): self.file = open("summary.txt", "w")
    def __del__(self): self.file.write(os.path.basename("done/well"))
summary = Summary()
def train():
    for step in range(5):
        print(step, file=log)
        print(step, file=zipped)
        archive.writestr(f"{step}.txt", str(step))
train()
if "fails" in sys.argv: raise RuntimeError("after the last step")
"""


@pytest.mark.parametrize("words", [(), ("fails",)], ids=["ends well", "fails"])
@pytest.mark.parametrize("way", WAYS)
def test_files_that_nobody_closes_are_complete(tmp_path: Path, way: str, words: tuple[str, ...]) -> None:
    (tmp_path / "files.py").write_text(FILES)
    assert run(way, "files.py", *words, cwd=str(tmp_path)) == len(words)
    assert (tmp_path / "log.csv").read_text() == "0\n1\n2\n3\n4\n"
    with gzip.open(tmp_path / "log.gz", "rt") as file:
        assert file.read() == "0\n1\n2\n3\n4\n"
    assert zipfile.ZipFile(tmp_path / "log.zip").namelist() == [f"{step}.txt" for step in range(5)]
    assert (tmp_path / "summary.txt").read_text() == "well"
    assert not [*tmp_path.glob("temporary*")]


@pytest.mark.smoke
def test_what_python_itself_holds_is_finalized_too(tmp_path: Path) -> None:
    assert run("cold", "finalisation.py", str(tmp_path / "out"), "held", cwd=str(SCRIPTS)) == 0
    printed = (tmp_path / "out").read_text().splitlines()
    for what in ("an attribute of sys", "an attribute of os", "in a context variable", "of a thread-local"):
        assert printed.count(f"del {what}") == 1


# C code prints after Python's end: what is in a buffer of C is written by exit().
LATE = """
import ctypes, sys, torch
libc, api = ctypes.CDLL(None), ctypes.pythonapi
libc.fdopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(libc.fdopen(2, b"w"))
if "nanobind" in sys.argv:
    state, known = api.PyInterpreterState_Get, api.PyInterpreterState_GetDict
    state.restype = known.restype = ctypes.c_void_p
    known.argtypes = (ctypes.c_void_p,)
    ctypes.cast(known(state()), ctypes.py_object).value["__nb_internals_test"] = None
class Last:
    def __del__(self, stderr=sys.stderr): print("a finalizer", file=stderr)
last = Last()
libc.fputs(b"nanobind: leaked 4 instances!\\n", file)
"""


@pytest.mark.parametrize(("words", "shown"), [((), True), (("nanobind",), False)], ids=["C code", "nanobind"])
def test_only_reports_of_nanobind_about_kept_modules_are_hidden(
    tmp_path: Path, words: tuple[str, ...], shown: bool
) -> None:
    (tmp_path / "late.py").write_text(LATE)
    done = phalanx("run", "-g", "1", "--cpu", "late.py", *words, cwd=str(tmp_path))
    assert done.code == 0, done.err
    assert "a finalizer" in done.err
    assert ("leaked 4 instances" in done.err) == shown


KEPT = """
import os, sys, threading
class Tee:
    def __init__(self, file, also): self.file, self.also = file, also
    def write(self, text): self.file.write(text); self.also.write(text)
    def flush(self): self.also.flush()
sys.stdout = Tee(open("tee.log", "w"), sys.stdout)
def read(file):
    started.set()
    while True: file.write("x"); file.flush()
started = threading.Event()
threading.Thread(target=read, args=(open("thread.log", "w"),), daemon=True).start()
started.wait()
class Late:
    def __del__(self): print("printed at the very end")
late = Late()
"""


def test_streams_and_running_threads_keep_their_files(tmp_path: Path) -> None:
    (tmp_path / "kept.py").write_text(KEPT)
    result = phalanx("run", "-g", "1", "--cpu", "kept.py", cwd=str(tmp_path))
    assert result.code == 0
    assert result.out == "printed at the very end\n"
    assert (tmp_path / "tee.log").read_text() == result.out
    assert "Exception" not in result.err
