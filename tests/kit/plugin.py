"""The pytest plugin that stands around every test: places of its own before, a search for leaks after.

A test that cannot but leave something says so, kind and name as patterns, and why:

    @pytest.mark.leaves("tmp:pymp-*", why="a killed worker cannot remove its forkserver's directory")

One that does not care how its workers come to be is marked `warmed`: torch is imported once for all such of a process.
`imported` is the same for plain Python, where the test starts it by tests.kit.imported.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from typing import Protocol

import pytest

from tests.kit import cli, handle, imported, leaks, state
from tests.kit.lab import fixtures

# What a scheduler, a launcher or a user's shell may have set, and what would change what is tested.
FOREIGN = ("PET_", "PHALANX_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_")
FOREIGN_NAMES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "PYTHON_EXEC"),
}


# Tests of the second tier: they need namespaces, sshd, Slurm, MPI, Chromium, sanitizers, torch's own suite or torchrun.
SYSTEM_FIXTURES = {"lab", "_lab", "ssh", "slurm"}
SYSTEM_FILES = (
    *("e2e/test_mpi.py", "e2e/test_browser.py", "e2e/test_page.py", "e2e/test_compat.py"),
    *("bench/test_browser.py", "watch/test_page.py"),
    *("collectives/test_suite.py", "collectives/test_mpi.py", "collectives/test_native.py", "faithful/"),
)


class Places(Protocol):
    """A TMPDIR and a PHALANX_HOME for one test."""

    tmp: str
    home: str

    def renew(self) -> None: ...


class Own(Places):
    """Places that no other test has used."""

    def __init__(self) -> None:
        # A short path, for that of a Unix socket may have 107 characters at most.
        self.root = tempfile.mkdtemp(prefix="kit-")
        self.number = 0
        self.make()

    def make(self) -> None:
        self.number += 1
        self.tmp = f"{self.root}/{self.number}/tmp"
        self.home = f"{self.root}/{self.number}/home"
        os.makedirs(self.tmp)

    def renew(self) -> None:
        # Places that nobody used are as good as new; to make and remove directories is what costs most.
        if os.listdir(self.tmp) or os.path.lexists(self.home):
            shutil.rmtree(os.path.dirname(self.tmp), ignore_errors=True)
            self.make()


class Warm(Places):
    """The places of a warm fork server, in which nothing else is left of the test before."""

    def __init__(self, env: cli.Env) -> None:
        self.tmp, self.home = str(env["TMPDIR"]), str(env["PHALANX_HOME"])

    def renew(self) -> None:
        for path in (*_inside(self.tmp), *_inside(self.home)):
            if os.path.basename(path) != "warm":
                shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)


def _inside(folder: str) -> list[str]:
    return [f"{folder}/{name}" for name in os.listdir(folder)]


_places = pytest.StashKey[Own]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--failed-to", metavar="FILE", help="what has failed, a line each: pytest @FILE runs that again")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "leaves(*patterns, why): what the test is allowed to leave behind")
    config.addinivalue_line(
        "markers", "system: needs namespaces, Slurm, MPI, Chromium, sanitizers, torch's own suite or torchrun; set here"
    )
    config.addinivalue_line("markers", "warmed: what the test runs finds torch imported already")
    config.addinivalue_line(
        "markers", "imported: plain Python does, too, where the test starts it by tests.kit.imported"
    )
    config.pluginmanager.register(fixtures, "lab")
    state.adopt_orphans()
    # A shell that runs us in the background ignores these, and every command of a test would inherit that.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    config.stash[_places] = Own()
    if config.getoption("failed_to") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Failed(config), "failed-to")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        below = os.path.relpath(item.path, os.path.dirname(os.path.dirname(__file__)))
        if below.startswith(SYSTEM_FILES) or SYSTEM_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("system")


class _Failed:
    """pytest's own --last-failed does not find again what xdist has put into a group."""

    def __init__(self, config: pytest.Config) -> None:
        self._file = str(config.getoption("failed_to"))
        self._names: dict[str, None] = {}
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._file)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._names[ungrouped(report.nodeid)] = None

    def pytest_sessionfinish(self) -> None:
        if self._names:  # or it has ended for another reason, and there is nothing to run again
            with open(self._file, "w") as file:
                file.writelines(f"{name}\n" for name in self._names)


def ungrouped(name: str) -> str:
    """A test without the group that xdist puts behind it."""
    return name.rpartition("@")[0] if name.rfind("@") > name.rfind("]") else name


def pytest_unconfigure(config: pytest.Config) -> None:
    cli.strike()
    imported.strike()
    shutil.rmtree(config.stash[_places].root, ignore_errors=True)


@pytest.fixture(scope="module")
def _fork_server() -> Iterator[cli.Env]:
    with cli.stage() as env:
        yield env


@pytest.fixture(autouse=True)
def _no_leaks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    # One fixture and not one a check, because it is set up first and torn down last, after all others have
    # tidied up; and a patch of its own, because the shared `monkeypatch` would be undone after the search.
    tmp_path_factory.getbasetemp()  # is made once and for all tests, so not in the TMPDIR of the first
    places: Places = request.config.stash[_places]
    warmth: cli.Env = {}
    if request.node.get_closest_marker("warmed"):
        warmth = request.getfixturevalue("_fork_server")
        places = Warm(warmth)
    plain = imported.use() if request.node.get_closest_marker("imported") else contextlib.nullcontext()
    with plain, pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            if name.startswith(FOREIGN) or name in FOREIGN_NAMES:
                patch.delenv(name)
        patch.setenv("TMPDIR", places.tmp)
        patch.setattr(tempfile, "tempdir", places.tmp)
        patch.setenv("PHALANX_HOME", places.home)
        for name, value in warmth.items():
            patch.setenv(name, value or "")
        started = handle.mark()
        before = leaks.Before(places.tmp, lambda leak: leaks.allowed(request.node, leak))
        yield
        handle.end_since(started)
        found = before.leaks()
        before.clean(found)
    places.renew()
    if found:
        pytest.fail("\n".join(str(leak) for leak in found), pytrace=False)
