"""The pytest plugin around every test: private folders before it, a check for leaks after it.

A test that must leave something behind declares it with patterns of kind and name, and the reason:

    @pytest.mark.leaves("tmp:pymp-*", why="a killed worker cannot remove its forkserver's directory")

A test that does not depend on how its workers start is marked `warmed`: torch is imported once for all such tests of a
process, and once on each node of a lab. `imported` is the same for plain Python that the test starts with
tests.kit.imported.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from typing import Protocol

import hypothesis
import pytest

from tests.kit import cli, handle, imported, leaks, ports, state, tiers
from tests.kit.lab import fixtures

# Variables that a scheduler, a launcher or a user's shell may have set, and that would change the results.
FOREIGN = ("PET_", "PHALANX_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_")
FOREIGN_NAMES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "PYTHON_EXEC"),
}


class Places(Protocol):
    """A TMPDIR and a PHALANX_HOME for one test."""

    tmp: str
    home: str

    def renew(self) -> None: ...


class Own(Places):
    """Folders that no other test has used."""

    def __init__(self) -> None:
        # A short path: the path of a Unix socket has at most 107 characters.
        self.root = tempfile.mkdtemp(prefix="kit-")
        self.number = 0
        self.make()

    def make(self) -> None:
        self.number += 1
        self.tmp = f"{self.root}/{self.number}/tmp"
        self.home = f"{self.root}/{self.number}/home"
        os.makedirs(self.tmp)

    def renew(self) -> None:
        # Reuse unused folders: creating and removing directories is the main cost.
        if os.listdir(self.tmp) or os.path.lexists(self.home):
            shutil.rmtree(os.path.dirname(self.tmp), ignore_errors=True)
            self.make()


class Warm(Places):
    """The folders of a warm fork server, without files of earlier tests."""

    def __init__(self, env: cli.Env) -> None:
        self.tmp, self.home = str(env["TMPDIR"]), str(env["PHALANX_HOME"])

    def renew(self) -> None:
        for path in (*_inside(self.tmp), *_inside(self.home)):
            if os.path.basename(path) != "warm":
                shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)


def _inside(folder: str) -> list[str]:
    return [f"{folder}/{name}" for name in os.listdir(folder)]


_places = pytest.StashKey[Own]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "leaves(*patterns, why): what the test is allowed to leave behind")
    for line in tiers.MARKERS:
        config.addinivalue_line("markers", line)
    config.addinivalue_line("markers", "warmed: what the test runs finds torch imported already")
    config.addinivalue_line(
        "markers", "imported: plain Python does, too, where the test starts it by tests.kit.imported"
    )
    config.pluginmanager.register(fixtures, "lab")
    hypothesis.settings.register_profile("kit", deadline=None)  # an example may take seconds on a loaded machine
    hypothesis.settings.load_profile("kit")
    state.adopt_orphans()
    # A shell that runs us in the background ignores these, and every command of a test would inherit that.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    ports.claim()  # here: in a test it would look like a leaked descriptor
    imported.claim()
    config.stash[_places] = Own()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without the garbage collector, which would scan torch and thousands of tests repeatedly."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # the same for every collection during a test
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tiers.sort(items)


def pytest_unconfigure(config: pytest.Config) -> None:
    cli.shut_down()
    imported.shut_down()
    shutil.rmtree(config.stash[_places].root, ignore_errors=True)


@pytest.fixture(autouse=True)
def _no_leaks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    # One fixture instead of one per check, because it is set up first and torn down last, after all others have cleaned
    # up. A separate patch, because the shared `monkeypatch` would be undone after the check.
    tmp_path_factory.getbasetemp()  # created once for all tests, so not in the TMPDIR of the first
    places: Places = request.config.stash[_places]
    warmth: cli.Env = {}
    with contextlib.ExitStack() as stack:
        if request.node.get_closest_marker("warmed"):
            # For each test, because the previous one may have ended the fork server.
            lab = request.getfixturevalue("_lab") if "_lab" in request.fixturenames else None
            warmth = lab.warm.start() if lab else stack.enter_context(cli.warm_environment())
            places = Warm(warmth)
        stack.enter_context(imported.commands())
        if request.node.get_closest_marker("imported"):
            stack.enter_context(imported.use())
        patch = stack.enter_context(pytest.MonkeyPatch.context())
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
    left = [str(leak) for leak in found] + _leave_group()
    if left:
        pytest.fail("\n".join(left), pytrace=False)


def _leave_group() -> list[str]:
    """Leave a process group that the test has formed in this process: the next test would find it."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return []
    dist.destroy_process_group()
    return ["leaked the default process group of this process"]
