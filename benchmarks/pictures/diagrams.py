"""The diagrams of docs/concepts."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.pictures.drawing import BLUE, GREEN, GREY, RED, YELLOW, Drawing


def architecture() -> str:
    """Return the parts of a run on one node, and who talks to whom."""
    d = Drawing(860, 400, "Parts of a run")
    d.frame(20, 20, 600, 360, "node 0")
    d.box(40, 50, 540, 60, "agent", "output, signals, run folder, decisions; never imports torch", fill=BLUE)
    d.box(40, 180, 220, 56, "fork server", "imports torch once, forks", fill=GREEN)
    d.box(360, 180, 220, 56, "store", "c10d TCPStore", fill=GREY)
    for number in range(3):
        d.box(40 + 190 * number, 295, 160, 66, f"worker {number}", "your script", "probe thread", fill=YELLOW)
        d.arrow(110 + 50 * number, 236, 120 + 160 * number, 295, "forks" if number == 0 else "")
    d.arrow(150, 110, 150, 180, "starts, supervises")
    d.arrow(470, 110, 470, 180, "supervises")
    d.arrow(310, 295, 310, 110, both=True)
    d.text(318, 150, "channel", size=12, color="#3b4557")
    d.arrow(520, 295, 520, 236, "rendezvous", both=True)
    d.box(660, 30, 180, 46, "terminal, browser", "phalanx watch, ui", fill=GREY)
    d.box(660, 86, 180, 46, "phalanx why, attach", "phalanx logs, stop", fill=GREY)
    d.arrow(660, 53, 580, 68)
    d.arrow(660, 109, 580, 86)
    d.text(662, 152, "control socket", size=12, color="#3b4557")
    d.box(660, 190, 180, 66, "nodes 1, 2, …", "agent, fork server,", "workers", fill=BLUE)
    d.arrow(660, 205, 575, 110)
    d.text(662, 274, "one TLS connection per node", size=12, color="#3b4557")
    d.box(660, 305, 180, 50, "run folder", "events, samples, logs", fill=GREY)
    d.arrow(620, 330, 660, 330)
    return d.svg()


def processes() -> str:
    """Return the processes of a run on one machine, in the order in which they start."""
    d = Drawing(860, 250, "How workers start")
    d.box(20, 90, 150, 66, "phalanx run", "agent", "no torch", fill=BLUE)
    d.box(260, 90, 190, 66, "fork server", "python -u train.py, paused", "import torch (once)", fill=GREEN)
    for number in range(3):
        d.box(600, 20 + 75 * number, 240, 56, f"worker {number}", "continues: runs train.py", fill=YELLOW)
        d.arrow(450, 123, 600, 48 + 75 * number, "fork" if number == 0 else "")
    d.arrow(170, 123, 260, 123, "starts")
    d.text(95, 190, "output, signals, exit codes", size=12, anchor="middle", color="#3b4557")
    d.text(355, 190, "about one import of torch,", size=12, anchor="middle", color="#3b4557")
    d.text(355, 206, "for any number of ranks", size=12, anchor="middle", color="#3b4557")
    return d.svg()


def packages() -> str:
    """Return the layers of the packages, as import-linter checks them: a package imports only from rows below its own.

    From the repository root.
    """
    contracts = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = {contract["name"]: contract["layers"] for contract in contracts if contract["type"] == "layers"}
    columns = (
        ("phalanx", 370, _rows(layers["imports point down"])),
        ("phalanx.launcher", 420, _rows(layers["packages of the launcher are layers"])),
    )
    height = 48 * max(len(rows) for _, _, rows in columns) + 36
    d = Drawing(860, height + 40, "Layers of the packages: imports point down")
    left = 20
    for title, width, rows in columns:
        d.frame(left, 20, width, height, title)
        for number, names in enumerate(rows):
            spare = width - 20 - 6 * (len(names) - 1) - 8 * len("".join(names))
            x = left + 10
            for name in names:
                each = 8 * len(name) + spare // len(names)
                d.box(x, 48 + 48 * number, each, 38, name, fill=GREEN if name == "launcher" else BLUE)
                x += each + 6
        left += width + 30
    d.arrow(405, 48, 405, height + 10)
    return d.svg()


def _rows(layers: Sequence[str]) -> list[list[str]]:
    return [[name.strip().removeprefix("phalanx.") for name in layer.split("|")] for layer in layers]


def nodes() -> str:
    """Return the connections between nodes."""
    d = Drawing(860, 300, "Connections between nodes")
    d.frame(290, 20, 280, 120, "node 0 (leads)")
    d.box(310, 48, 240, 34, "agent: control port 29500", fill=BLUE)
    d.box(310, 92, 110, 34, "store", fill=GREY)
    d.box(430, 92, 120, 34, "workers 0-7", fill=YELLOW)
    for number, (x, ranks) in enumerate(((40, "8-9"), (540, "10-17")), 1):
        d.frame(x, 190, 280, 90, f"node {number}")
        agent, workers = (x + 20, x + 140) if number == 1 else (x + 150, x + 20)
        d.box(agent, 222, 110, 40, "agent", fill=BLUE)
        d.box(workers, 222, 120, 40, f"workers {ranks}", fill=YELLOW)
    d.arrow(95, 222, 310, 66)
    d.arrow(765, 222, 550, 66)
    d.text(24, 60, "TLS 1.3; both sides prove", size=12)
    d.text(24, 76, "that they have the token", size=12)
    d.text(610, 60, "joins, start, output, evidence", size=12)
    d.text(610, 76, "and result use this connection", size=12)
    d.arrow(240, 222, 365, 126, both=True)
    d.arrow(620, 222, 490, 126, both=True)
    d.text(430, 172, "store, gloo, NCCL", size=12, anchor="middle", color="#3b4557")
    return d.svg()


def verdict() -> str:
    """Return the path from a stalled rank to a verdict."""
    d = Drawing(860, 210, "From a stalled rank to a verdict")
    steps = (
        ("probe", "in every worker:", "phase, line,", "collective; 10/s", YELLOW),
        ("status board", "shared memory,", "one slot", "per worker", GREY),
        ("hang detector", "no progress for", "--stall-timeout", "on any rank", BLUE),
        ("evidence", "all nodes: stacks,", "flight recorder,", "/proc, GPUs", BLUE),
        ("verdict", "rank, line,", "reason, fix:", "a pure function", GREEN),
    )
    for number, (title, *lines, fill) in enumerate(steps):
        d.box(16 + 170 * number, 40, 142, 96, title, *lines, fill=fill)
        if number:
            d.arrow(170 * number - 12, 88, 16 + 170 * number, 88)
    d.text(
        430,
        172,
        "--on-hang: report (console, page, run folder), kill the rank to blame, or stop the run",
        anchor="middle",
    )
    return d.svg()


def data_order() -> str:
    """Return one epoch that begins on 4 ranks and continues on 3."""
    order = (7, 2, 19, 11, 4, 16, 0, 9, 21, 13, 5, 18, 1, 23, 8, 14, 3, 20, 10, 6, 22, 12, 17, 15)
    d = Drawing(860, 230, "Order of an epoch on 4 ranks, then on 3")
    d.text(20, 30, "Order of the epoch: depends only on seed, epoch and length of the data set", bold=True)
    for number, sample in enumerate(order):
        d.box(20 + 34 * number, 44, 32, 30, str(sample), fill=GREEN if number < 12 else YELLOW)
    d.text(20, 108, "a step of 4 ranks takes the next 12 samples: 3 per rank", size=12)
    d.text(430, 108, "a rank is lost: a step of 3 ranks takes the next 12, 4 per rank", size=12)
    for rank in range(4):
        d.box(
            20 + 102 * rank,
            122,
            98,
            44,
            f"rank {rank}",
            ", ".join(map(str, order[3 * rank : 3 * rank + 3])),
            fill=GREEN,
        )
    for rank in range(3):
        part = order[12 + 4 * rank : 16 + 4 * rank]
        d.box(430 + 136 * rank, 122, 132, 44, f"rank {rank}", ", ".join(map(str, part)), fill=YELLOW)
    d.box(20, 182, 814, 34, "position after the first step: 12 samples, whatever the number of ranks", fill=RED)
    return d.svg()


DIAGRAMS: dict[str, Callable[[], str]] = {
    "architecture.svg": architecture,
    "processes.svg": processes,
    "packages.svg": packages,
    "nodes.svg": nodes,
    "verdict.svg": verdict,
    "data-order.svg": data_order,
}
