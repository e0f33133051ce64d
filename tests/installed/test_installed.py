"""Errors that only an installation can have: `make dist` runs this with the installed wheel."""

from __future__ import annotations

import contextlib
import http.client
import importlib.metadata
import json
import re
import sys
from importlib import resources
from pathlib import Path

import pytest

import phalanx as package
from phalanx.cli.main import VERBS
from phalanx.watch.page import assets
from tests.chaos import oracle
from tests.kit.cli import phalanx, python, run, start

# Programs, which run something when they are imported.
PROGRAMS = ("phalanx.demo.broken", "phalanx.demo.digits", "phalanx.forkserver.hook.sitecustomize")
# torch finds the backend by an entry point, without an import of phalanx. It needs the C extension.
BACKEND = """
import torch, torch.distributed as dist
dist.init_process_group("shm", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
value = torch.ones(3)
dist.all_reduce(value)
print(value.tolist())
dist.destroy_process_group()
"""
MODULES = f"""
import importlib, pkgutil, phalanx
names = {{module.name for module in pkgutil.walk_packages(phalanx.__path__, "phalanx.")}}
for name in names.difference({PROGRAMS!r}):
    if not name.endswith("__main__"):
        importlib.import_module(name)
print("phalanx.collectives._native" in names, len(names))
"""


@pytest.mark.extended
def test_the_backend_and_all_modules_can_be_imported() -> None:
    done = python("-c", BACKEND + MODULES, timeout=180)
    assert done.code == 0, done.err
    assert re.fullmatch(r"\[1.0, 1.0, 1.0\]\nTrue [1-9]\d\d\n", done.out), done.out


def test_the_command_and_its_version() -> None:
    done = run((str(Path(sys.executable).parent / "phalanx"), "--version"))
    assert (done.code, done.out) == (0, f"phalanx {package.__version__}\n")
    assert importlib.metadata.version("phalanx") == package.__version__


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str) -> None:
    done = phalanx(verb, "--help")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"usage: phalanx {verb}")


def test_types_are_published() -> None:
    assert resources.files(package).joinpath("py.typed").is_file()


@pytest.mark.extended
@pytest.mark.warmed
def test_a_killed_rank_is_replaced_and_the_checkpoint_is_read_again(tmp_path: Path) -> None:
    """During the run, the page has all its files. After it, a report can be written."""
    words = ("-g", "2", "--cpu", "--checkpoints", str(tmp_path / "kept"))
    script = (oracle.SCRIPT, str(tmp_path), '[[5, 1, "kill"]]')
    with start("run", *words, "--page", "--name", "killed", *script, env={"PAUSE": "0.1"}) as job:
        (link,) = job.wait_for(re.compile(r"see http://127\.0\.0\.1:(\d+)/#"), timeout=180)
        for path in ("/", *(f"/assets/{name}" for name in assets.names())):
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", int(link[1]), timeout=60)) as connection:
                connection.request("GET", path)
                answer = connection.getresponse()
                assert (answer.status, bool(answer.read())) == (200, True), path
        (tmp_path / "end").touch()  # the training ends with this epoch
        assert job.wait(180) == 0, job.err
    assert "rank 1 failed: SIGKILL" in job.err
    oracle.check(tmp_path, 2)
    steps, _ = json.loads((tmp_path / "end.0").read_text())
    epochs = steps // oracle.EPOCH + 1
    done = phalanx("run", *words, *script, timeout=180, env={"EPOCHS": str(epochs)})
    assert done.code == 0, done.err
    assert f"resumed at step {steps}" in done.out + done.err
    oracle.check(tmp_path, 2, epochs=epochs)
    assert phalanx("report", "killed", "-o", str(tmp_path / "report.html")).code == 0
    assert "SIGKILL" in (tmp_path / "report.html").read_text()
