"""The kinds of the campaign: 1,000 faults in total."""

from __future__ import annotations

import signal

from tests.chaos import disks, nodes, placed
from tests.chaos.campaign import Kind
from tests.chaos.endings import ended, interrupt, kill, terminate
from tests.chaos.placed import all_at_once, at_a_save, in_recovery, spread, together
from tests.chaos.signals import SILENT, sent

CRASHES = ("segv", "abort", "bus")
EXITS = ("exit 1", "exit 7", "exit 255", "leave 3")
COMBINED = (
    "store+kill",
    "store-stop+kill",
    "forkserver+kill",
    "forkserver-stop+kill",
    "store+forkserver+kill",
    "store-stop+forkserver-stop+kill",
)

KINDS = {
    kind.name: kind
    for kind in (
        Kind("kill", 230, 25, sent("kill"), "SIGKILL to a rank, at random times"),
        Kind("crash", 50, 25, sent("segv", "abrt", "bus"), "SIGSEGV, SIGABRT or SIGBUS to a rank"),
        Kind(
            "in-step",
            60,
            10,
            placed.placed(lambda *at: spread(*at, "kill", *CRASHES)),
            "a rank dies at a step, in the backward or after it",
        ),
        Kind("in-recovery", 60, 10, placed.placed(in_recovery), "a rank dies, and another while the group forms again"),
        Kind(
            "at-save",
            20,
            4,
            placed.placed(at_a_save, "--checkpoints", "FOLDER/kept", "--checkpoint-every", "2"),
            "rank 0 dies in a save, a rank at the end of an epoch",
        ),
        Kind("exit", 50, 10, placed.placed(lambda *at: spread(*at, *EXITS)), "a rank exits with an error code"),
        Kind(
            "exit-0", 10, 5, placed.exit_0, "a rank exits with code 0: the run ends and names it; the command continues"
        ),
        Kind("raise", 40, 8, placed.placed(lambda *at: spread(*at, "raise")), "a rank raises"),
        Kind("together", 40, 10, placed.placed(together, ranks=(3,)), "two of three ranks die at the same step"),
        Kind("all", 20, 4, placed.placed(all_at_once), "all ranks die at once"),
        Kind("stop", 30, 5, sent("stop", options=SILENT), "SIGSTOP to a rank"),
        Kind(
            "spin",
            15,
            5,
            placed.placed(lambda *at: spread(*at, "spin"), *SILENT),
            "a rank that holds the GIL and never releases it",
        ),
        Kind("store", 60, 20, sent("store", "kill"), "SIGKILL to the store, or to a rank that then needs it"),
        Kind(
            "store-stop",
            15,
            5,
            sent("store-stop", "kill"),
            "SIGSTOP to the store, or SIGKILL to a rank that then needs it",
        ),
        Kind(
            "forkserver",
            25,
            5,
            sent("forkserver", "kill", options=("--no-warm",)),
            "SIGKILL to the fork server, or to a rank",
        ),
        Kind(
            "forkserver-stop",
            10,
            5,
            sent("forkserver-stop", "kill", options=("--no-warm",)),
            "SIGSTOP to the fork server, or SIGKILL to a rank",
        ),
        Kind(
            "combined",
            20,
            5,
            sent(*COMBINED, options=("--no-warm",)),
            "signals to a rank, and to the store, the fork server or both, at the same moment",
        ),
        Kind(
            "agent",
            25,
            5,
            ended(kill, {-signal.SIGKILL}, early=False),
            "SIGKILL to the agent; the same command continues",
        ),
        Kind("preempt", 25, 5, ended(terminate, {75}, early=False), "SIGTERM to the agent; the same command continues"),
        Kind("ctrl-c", 75, 15, ended(interrupt, {130}, early=True), "Ctrl-C at a random time, sometimes twice"),
        Kind("children", 30, 6, placed.children, "ranks die that have started servers and children"),
        Kind("edited", 30, 5, placed.edited, "ranks die after their script was changed, broken or deleted"),
        Kind("disk-full", 20, 5, disks.full, "no space left when checkpoints are due", needs_root=True),
        Kind("memory", 10, 5, placed.greedy, "a rank is killed for memory", needs_root=True),
        Kind(
            "node-kill",
            10,
            5,
            nodes.lost(nodes.kill, leads=False),
            "the agent or all processes of a node are killed",
            needs_root=True,
        ),
        Kind(
            "leader-kill",
            5,
            5,
            nodes.lost(nodes.kill, leads=True),
            "the same with the node that leads",
            needs_root=True,
        ),
        Kind("node-stop", 5, 5, nodes.lost(nodes.stop, leads=False), "SIGSTOP to the agent of a node", needs_root=True),
        Kind("link", 6, 3, nodes.lost(nodes.cut, leads=False), "the link of a node is cut", needs_root=True),
        Kind("partition", 4, 2, nodes.parted, "two of three nodes do not reach each other", needs_root=True),
    )
}

OF_NODES = ("node-kill", "leader-kill", "node-stop", "link", "partition")
