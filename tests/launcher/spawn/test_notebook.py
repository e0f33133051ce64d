"""phalanx.spawn in the kernel of a notebook: what a cell shows while ranks run, fail, time out and are interrupted."""

from __future__ import annotations

import queue
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

pytestmark = [pytest.mark.extended, pytest.mark.xdist_group("notebook")]  # one kernel for all of them

TRAIN = """
import sys, time, torch, phalanx

def train(run):
    for i in range(4):
        print(f"\\r{i}/4", end="", file=sys.stderr, flush=True)
        time.sleep(0.2)
        print("line", i, flush=True)
    return run.rank

def stuck(run):
    torch.distributed.barrier()
    if run.rank == 1:
        time.sleep(1000 if print("stuck", flush=True) is None else 0)  # seen printing, it is at this line
    torch.distributed.barrier()
"""


@dataclass
class Cell:
    """The outputs of a cell, as a notebook saves them."""

    outputs: list[str] = field(default_factory=list)  # the stream of each one, or "display"
    text: dict[str, str] = field(default_factory=dict)
    updates: list[str] = field(default_factory=list)  # of the display
    result: str = ""
    error: str = ""


class Notebook:
    """A kernel, and what it answers."""

    def __init__(self, folder: Path) -> None:
        # Over Unix sockets: another process may take a TCP port before the kernel opens it.
        self.manager = KernelManager(transport="ipc", connection_file=str(folder / "kernel.json"))
        assert self.manager.kernel_spec is not None
        self.manager.kernel_spec.argv[0] = sys.executable
        self.manager.start_kernel()
        self.client = self.manager.client()
        self.client.start_channels()

    def run(self, code: str, interrupt: Callable[[Cell], bool] = lambda cell: False) -> Cell:
        """Execute a cell; interrupt the kernel as soon as `interrupt` returns True."""
        asked, cell, interrupted = self.client.execute(code), Cell(), False
        until = time.monotonic() + 120
        while time.monotonic() < until:
            if not interrupted and interrupt(cell):
                interrupted = True
                self.manager.interrupt_kernel()
            try:
                message = self.client.get_iopub_msg(timeout=0.2)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") == asked and _take(cell, message["msg_type"], message["content"]):
                return cell
        raise AssertionError(f"the cell has not ended: {cell}")

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()


def _take(cell: Cell, kind: str, content: dict[str, Any]) -> bool:
    """Add a message to the cell; return whether it is the last one."""
    match kind:
        case "stream":
            name = content["name"]
            cell.text[name] = cell.text.get(name, "") + content["text"]
            if cell.outputs[-1:] != [name]:  # notebooks join what follows on the same stream
                cell.outputs.append(name)
        case "display_data" | "update_display_data":
            cell.updates.append(content["data"]["text/plain"])
            if kind == "display_data":
                cell.outputs.append("display")
        case "execute_result":
            cell.result = content["data"]["text/plain"]
        case "error":
            cell.error = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(content["traceback"]))
        case "status":
            return bool(content["execution_state"] == "idle")
    return False


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    notebook = Notebook(tmp_path_factory.mktemp("kernel"))
    try:
        notebook.client.wait_for_ready(120)
        notebook.run(TRAIN)
        yield notebook
    finally:
        notebook.close()


def test_the_progress_bar_is_redrawn_in_one_place(notebook: Notebook) -> None:
    cell = notebook.run("phalanx.spawn(train, 2)")
    assert cell.result == "[0, 1]", cell
    assert [text for text in cell.updates if text] == [f"[0] {i}/4" for i in range(4)]
    assert cell.updates[-1] == ""
    assert sorted(cell.text["stdout"].splitlines()) == [f"[{rank}] line {i}" for rank in (0, 1) for i in range(4)]
    assert "\r" not in cell.text["stdout"] + cell.text["stderr"]
    assert set(cell.text["stderr"].splitlines()) == {"[0] 3/4", "[1] 3/4"}  # the last states
    assert cell.outputs == ["display", "stdout", "stderr"]


def test_a_failure_shows_the_line_of_the_cell(notebook: Notebook) -> None:
    cell = notebook.run("def bad(run):\n    return run.rnak\n\nphalanx.spawn(bad, 2)")
    assert "AttributeError: Run has no 'rnak'" in cell.error
    assert re.search(r"Cell In\[\d+\]:2 in bad\n      return run.rnak", cell.error)


def test_a_timeout_says_who_waits_for_whom(notebook: Notebook) -> None:
    cell = notebook.run("phalanx.spawn(stuck, 2, timeout=15)")
    assert "LaunchError: ranks 0, 1 of 2 had not ended after 15 s, and were stopped" in cell.error
    assert re.search(r"rank 1 is sleeping at Cell In\[1\]:\d+ in stuck; the other one \(rank 0\) waits", cell.error)
    assert "stderr" not in cell.text  # torch's stacks about the store that is gone


def test_an_interrupt_says_who_waits_for_whom(notebook: Notebook) -> None:
    cell = notebook.run("phalanx.spawn(stuck, 2)", lambda cell: "stuck" in cell.text.get("stdout", ""))
    assert "KeyboardInterrupt: ranks 0, 1 of 2 were stopped" in cell.error
    assert re.search(r"rank 1 is at Cell In\[1\]:\d+ in stuck: time.sleep\(1000", cell.error)
    assert "group.py" not in cell.error
    assert "stderr" not in cell.text
    assert notebook.run("phalanx.spawn(train, 2)").result == "[0, 1]"
