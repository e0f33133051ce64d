"""What the attempts of a run share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from phalanx.contract.messages import worker_messages
from phalanx.diagnose.rules.collectives.timeouts import Timeout
from phalanx.forkserver import wire
from phalanx.launcher.forking.source_snapshot import SourceSnapshot
from phalanx.launcher.output.console.console import Console
from phalanx.launcher.output.log_forwarder import LogForwarder
from phalanx.launcher.runs.run_folder import RunFolder
from phalanx.launcher.workers.probes import StatusBoard
from phalanx.launcher.workers.store_peers import StorePeers
from phalanx.launcher.workers.worker import WorkerFailure

Blame = Callable[[int, Timeout], Awaitable[list[str]]]  # rank that timed out -> lines about the cause


class RegroupObserver(Protocol):
    """Follows how workers regroup and halt: the coordinator."""

    def regroup_ready(self, connected: bool, finished: bool, all_connected: bool) -> None:
        """Handle a change of the readiness of this node's workers.

        `connected`: a worker has connected, so the script can regroup. `finished`: a worker has finished, so no new
        group can form.
        """

    def rank_left(self) -> None:
        """Handle a rank that exited without an error in the middle of the training."""

    def first_step(self, message: worker_messages.FirstStep) -> None:
        """Handle the first committed step of a generation."""

    def batch_skipped(self, message: worker_messages.SkippedBatch) -> None:
        """Handle an update that was dropped because it was not finite."""

    def halt_message(
        self, rank: int, message: worker_messages.Keeping | worker_messages.HaltAck | worker_messages.HaltedAt
    ) -> None:
        """Handle the report of a rank about a halt."""


@dataclass(frozen=True)
class WorkerGroupContext:
    """What all attempts of a run share."""

    folder: RunFolder
    console: Console
    observer: RegroupObserver
    note: Callable[[str], None]
    # Called when a worker has failed. The decision follows in another call.
    worker_failed: Callable[[WorkerFailure], None]
    log_forwarder: LogForwarder | None = None  # sends output to the leader
    echo: bool = True  # print output on this node
    memory: str = ""  # address of the snapshot memory; empty: none
    board: StatusBoard | None = None
    probe_message: Callable[[str, wire.Message, list[int]], None] | None = None  # for messages that are not answers
    measured: Callable[[worker_messages.MeasuredStep], None] | None = None  # for metrics of rank 0
    blame: Blame | None = None  # explains the timeout of a rank
    memory_kill: Callable[[int], str] | None = None  # what the kernel reports about memory when this pid was killed
    sources: SourceSnapshot | None = None  # the script and its modules at the start of the run
    store_peers: StorePeers | None = None  # whether processes of other nodes may connect to the store; None: one node
