"""The lab as pytest fixtures: created for the first test that uses it, reset before each test, checked for leaks after
each.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.kit import handle, leaks, proc
from tests.kit.lab.lab import Lab
from tests.kit.lab.node import Node
from tests.kit.lab.slurm import Slurm
from tests.kit.lab.sshd import Sshd

SERVICES = {"ssh", "slurm"}
_made = pytest.StashKey[Lab]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Distribute tests of the lab to three workers, each with one lab: those that need daemons, fork servers, or
    neither.
    """
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            names = getattr(item, "fixturenames", ())
            if "_lab" in names:
                if not SERVICES.isdisjoint(names):
                    group = "lab with services"
                else:
                    group = "warm lab" if item.get_closest_marker("warmed") else "lab"
                item.add_marker(pytest.mark.xdist_group(group))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # Here and not in a fixture: a restarted daemon must not look like a leak of the test.
    if "_lab" in getattr(item, "fixturenames", ()) and (lab := item.config.stash.get(_made, None)):
        for service in lab.services:
            service.start()


@pytest.fixture(scope="session")
def _lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    with Lab(3) as lab:
        request.config.stash[_made] = lab
        yield lab
        del request.config.stash[_made]


@pytest.fixture(scope="session")
def ssh(_lab: Lab) -> Sshd:
    """sshd on every node; `ssh.env` is for a command that uses it."""
    return _lab.sshd()


@pytest.fixture(scope="session")
def slurm(_lab: Lab) -> Slurm:
    """Slurm on every node; `slurm.env` is for a command that uses it."""
    return _lab.slurm()


@pytest.fixture
def lab(request: pytest.FixtureRequest, _lab: Lab) -> Iterator[Lab]:
    """Three nodes, reset."""
    _lab.reset()
    started = handle.mark()
    before = Before(_lab)
    yield _lab
    if handle.mark() > started:
        # A killed srun cannot cancel its job: jobs that a test did not end are ended here, and are no leak.
        before.cancel()
    handle.end_since(started)
    _lab.reset()
    found = before.left(request.node)
    before.clean()
    if found:
        pytest.fail("\n".join(str(leak) for leak in found), pytrace=False)


class Before:
    """The state of the nodes before the test."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.processes = {process.identity for node in lab for process in node.living()}
        self.memory = {node.name: node.shared_memory() for node in lab}

    def left(self, item: pytest.Item) -> list[leaks.Leak]:
        """Return the leftovers, after a grace period for processes that are just ending."""
        end = time.monotonic() + leaks.GRACE
        while True:
            found = [leak for leak in self._differences() if not leaks.allowed(item, leak)]
            if not found or time.monotonic() > end:
                return found
            time.sleep(0.02)

    def cancel(self) -> None:
        for service in self.lab.services:
            if isinstance(service, Slurm):
                service.cancel()

    def clean(self) -> None:
        self.cancel()
        proc.until(self._kill, 10, "what was left on the nodes to die")
        for node in self.lab:
            for name in node.shared_memory() - self.memory[node.name]:
                os.unlink(f"{node.memory}/{name}")

    def _kill(self) -> bool:
        left = [process for node in self.lab for process in self._new(node)]
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        return not left

    def _new(self, node: Node) -> list[proc.Process]:
        return [process for process in node.living() if not process.exiting and process.identity not in self.processes]

    def _differences(self) -> Iterator[leaks.Leak]:
        for service in self.lab.services:
            if isinstance(service, Slurm):
                for job in service.jobs():
                    yield leaks.Leak("slurm", job, f"slurm job {job}")
        for node in self.lab:
            for process in self._new(node):
                words = proc.command(process.pid) or "(no command line)"
                yield leaks.Leak("process", words, f"process {process.pid} on {node.name}: {words}")
            for name in sorted(node.shared_memory() - self.memory[node.name]):
                yield leaks.Leak("shm", name, f"shared memory /dev/shm/{name} on {node.name}")
