"""The messages in docs/troubleshooting.md are those that torch and phalanx print."""

from __future__ import annotations

import html
import mmap
import re
import socket
from pathlib import Path

import pytest
import torch

from phalanx.launcher.telemetry.out_of_memory import MemoryKills
from tests.docs.blocks import ROOT
from tests.kit.cli import phalanx

PAGE = html.unescape((ROOT / "docs" / "troubleshooting.md").read_text())
TITLES = re.findall(r"^### (.+)$", PAGE, re.M)
GROUP = "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"


def test_twenty_messages() -> None:
    assert len(TITLES) >= 20
    assert len(set(TITLES)) == len(TITLES)


# Fragments of messages, by the file of torch that has them. Those of NCCL are not in a build for CPUs.
MESSAGES = {
    "lib/libtorch_cpu.so": (
        "The server socket has failed to listen on any local network address. port: ",
        "The client socket has timed out after ",
        "The client socket has failed to connect to any network address of (",
        " seconds waiting for clients. ",
        "Gloo connectFullMesh failed with ",
        "Expected to have finished reduction in the prior iteration before starting a new one.",
        "Detected mismatch between collectives on ranks",
        "unable to open shared memory object <",
        "Connection closed by peer ",
    ),
    "lib/libtorch_python.so": (
        "Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
        " is killed by signal: ",
        "It is possible that dataloader's workers are out of shared memory.",
    ),
    "distributed/run.py": ("Setting OMP_NUM_THREADS environment variable for each process to be ",),
    "distributed/distributed_c10d.py": ("Default process group has not been initialized, ",),
    "distributed/elastic/multiprocessing/api.py": (" got signal: ",),
    "distributed/elastic/multiprocessing/errors/__init__.py": (
        "class ChildFailedError",
        " received by PID ",
        "To enable traceback see",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_are_those_of_torch(name: str) -> None:
    with (
        open(Path(torch.__file__).parent / name, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        for text in MESSAGES[name]:
            assert content.find(text.encode()) >= 0, text
            assert text.removeprefix("class ").strip() in PAGE, text


def test_rules_of_lint_are_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, torch\nimport torch.distributed as dist\nos.environ['MASTER_PORT'] = '29500'\n"
        "dist.init_process_group()\ndist.all_reduce(torch.ones(1).cuda())\ndist.destroy_process_group()\n"
    )
    found = phalanx("lint", str(script))
    for rule in ("fixed-address", "first-gpu"):
        assert f"[{rule}]" in found.out
        assert f"`{rule}`" in PAGE


def test_memory_that_ran_out() -> None:
    before, group, machine = MemoryKills(0, 0), MemoryKills(1, 1, 2 << 30), MemoryKills(0, 1)
    assert f"`{group.since(before)}`" in PAGE
    assert f"`{machine.since(before)}`" in PAGE


def run(folder: Path, script: str, *options: str) -> str:
    (folder / "train.py").write_text(script)
    return phalanx("run", "-g", "2", "--cpu", *options, "train.py", cwd=str(folder), timeout=120).err


@pytest.mark.extended
@pytest.mark.warmed
class TestRuns:
    def test_a_port_in_use(self, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
            output = run(tmp_path, GROUP, "--master-port", port)
        assert "Address already in use" in TITLES
        first, held, fix = output.splitlines()[0], output.splitlines()[1], output.splitlines()[-1]
        assert first.replace(port, "29500") in PAGE
        assert held.startswith("  held by pid ")
        assert fix in PAGE

    def test_no_group(self, tmp_path: Path) -> None:
        output = run(tmp_path, "import torch, torch.distributed as dist\ndist.all_reduce(torch.ones(1))\n")
        (title,) = [title for title in TITLES if title.startswith("Default process group")]
        assert title in output

    def test_a_script_that_does_not_expect_its_local_rank(self, tmp_path: Path) -> None:
        output = run(tmp_path, "import argparse\nargparse.ArgumentParser().parse_args()\n", "--pass-local-rank")
        assert "unrecognized arguments: --local-rank=" in output
        assert "unrecognized arguments: --local-rank=0" in TITLES

    def test_a_collective_that_times_out(self, tmp_path: Path) -> None:
        script = (
            "import time, datetime, torch, torch.distributed as dist\n"
            "def load():\n    time.sleep(1000)\n"
            "dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=5))\n"
            "x = torch.ones(110)\ndist.all_reduce(x)\n"
            "if dist.get_rank() == 1:\n    load()\ndist.all_reduce(x)\n"
        )
        output = run(tmp_path, script)
        shown = re.search(r"^phalanx: rank 1 did not reach .*$", PAGE, re.M)
        assert shown is not None
        pattern = re.sub(r"\d+", r"\\d+", re.escape(shown[0]).replace(r"\ ", " "))
        assert re.search(pattern, output), output

    def test_a_peer_that_died(self, tmp_path: Path) -> None:
        output = run(
            tmp_path, GROUP + "if dist.get_rank() == 1:\n    raise ValueError('mine')\ndist.all_reduce(torch.ones(1))\n"
        )
        assert "rank 1 failed: ValueError: mine" in output
        # Rank 0 may be stopped before it notices.
        assert "afterwards: rank 0 lost the peer" in output or "rank 0" not in output
        assert "lost the peer" in PAGE

    def test_collectives_that_differ(self, tmp_path: Path) -> None:
        script = (
            "x = torch.ones(4)\nif dist.get_rank() == 1:\n    dist.broadcast(x, 0)\nelse:\n    dist.all_reduce(x)\n"
        )
        output = run(tmp_path, GROUP + script, "--check-collectives")
        assert "train.py:5" in output  # the page shows both lines
        assert "train.py:7" in output
