"""The groups of options that a plan carries. cli/options/table.py declares the options, with their defaults."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from string import Template
from typing import TYPE_CHECKING, Literal

from phalanx.cluster.placement import Seat
from phalanx.launcher.output import filters
from phalanx.launcher.output.filters import Std, Streams

if TYPE_CHECKING:  # imports before the start of the fork server delay it
    from phalanx.recover.decision import RestartPolicy

TEE_PREFIX = "[${role_name}${local_rank}]:"  # torchrun's prefix of a teed line
_STOP_TIMEOUT = 30.0
_FAILURE_TIMEOUT = 5.0


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What is shown of the workers' output, how, and where it is logged."""

    name: str | None  # of the run; None: not given
    log_dir: str | None
    redirects: Streams
    tee: Streams
    ranks: frozenset[int] | None  # global ranks to show; None: all
    local_ranks: frozenset[int] | None
    line_prefix: str | None  # torchrun's template; None: phalanx's own prefix
    stdout_filters: tuple[str, ...]
    stderr_filters: tuple[str, ...]
    event_log_handler: str
    color: Literal["auto", "always", "never"]
    quiet: bool
    verbose: bool  # show the traceback of every rank when it is printed
    timings: bool  # show the step timings of all ranks at the end, even if no rank is slow

    def use_color(self, environ: Mapping[str, str]) -> bool | None:
        """Return whether to use colors. None: only on a terminal."""
        if self.color == "auto":
            return False if environ.get("NO_COLOR") or environ.get("TERM") == "dumb" else None
        return self.color == "always"

    @property
    def print_events(self) -> bool:
        """Return whether the run's events are printed to the console."""
        return self.event_log_handler == "console"

    def shown(self, seat: Seat) -> Std:
        """Return the streams of a rank that the console shows."""
        local = seat.local_rank
        return filters.shown(
            local,
            seat.rank,
            redirects=self.redirects.of(local),
            tee=self.tee.of(local),
            local_ranks=self.local_ranks,
            ranks=self.ranks,
        )

    def duplicated(self, seat: Seat) -> Std:
        """Return the streams of a rank that are searched for `stdout_filters` and `stderr_filters`."""
        return filters.duplicated(seat.local_rank, tee=self.tee.of(seat.local_rank), local_ranks=self.local_ranks)

    def separate(self, seat: Seat) -> bool:
        """Return whether stdout and stderr of this rank need a file each: --tee and --redirects are per stream."""
        local = seat.local_rank
        return bool(self.tee.of(local)[local] | self.redirects.of(local)[local])

    def prefix_template(self, local_rank: int) -> str | None:
        """Return the template of the prefix: the user's or torchrun's. None: phalanx's own prefix."""
        if self.line_prefix is None and self.tee.of(local_rank)[local_rank]:
            return TEE_PREFIX
        return self.line_prefix

    def prefix(self, seat: Seat, host: str, role: str) -> str | None:
        """Return the prefix of a rank's lines, from the user's template or torchrun's. None: phalanx's own."""
        template = self.prefix_template(seat.local_rank)
        if template is None:
            return None
        return Template(template).safe_substitute(
            role_name=role, rank=seat.rank, local_rank=seat.local_rank, hostname=host
        )


@dataclass(frozen=True, kw_only=True)
class ViewerOptions:
    """How the run is shown, besides its output."""

    screen: bool = False  # in this terminal
    page: bool | None = None  # in a browser; None: if this is a terminal and the run has one node
    page_at: str | None = None  # address, port or both; None: not given


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """How worker processes are created."""

    fresh: bool
    preload: tuple[str, ...]
    warm: bool  # use a warm fork server if there is one
    keep_warm: float  # seconds; 0: keep none


@dataclass(frozen=True, kw_only=True)
class RecoveryOptions:
    """What follows a failure."""

    max_restarts: int
    max_restarts_given: bool  # by the user
    restart_window: float  # seconds
    worker_timeout: float  # seconds without a heartbeat after which a worker that can regroup is replaced

    @property
    def policy(self) -> RestartPolicy:
        """Return how many restarts are allowed."""
        from phalanx.recover.decision import RestartPolicy

        return RestartPolicy(self.max_restarts if self.max_restarts_given else None, self.restart_window)


@dataclass(frozen=True, kw_only=True)
class HangOptions:
    """How hangs are detected, and what is done about the rank to blame."""

    stall_timeout: float | None  # seconds; None: no detection
    action: Literal["report", "kill", "stop"]
    check_collectives: bool


@dataclass(frozen=True, kw_only=True)
class ShutdownOptions:
    """How workers are stopped."""

    signals: tuple[signal.Signals, ...]  # forwarded to the workers
    timeout: float | None  # seconds until SIGKILL; None: not given
    preempt_signals: tuple[signal.Signals, ...]  # checkpoint, then exit
    checkpoint_timeout: float  # seconds for that checkpoint
    # Seconds to wait for processes that ranks left running after a successful run; None: leave them running. The
    # default is enough to upload 100 MB of logs at 10 Mbit/s.
    linger: float | None

    @property
    def stop_timeout(self) -> float:
        """Return the seconds between asking workers to stop and SIGKILL."""
        return _STOP_TIMEOUT if self.timeout is None else self.timeout

    @property
    def failure_timeout(self) -> float:
        """Return the same after a failure, when the other ranks cannot continue."""
        return _FAILURE_TIMEOUT if self.timeout is None else self.timeout
