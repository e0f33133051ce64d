"""Launchers that recover from the death of a rank, and the training loop that each of them runs."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from benchmarks.common.launchers import LAUNCHERS, Launcher
from benchmarks.common.paths import script

_RESTARTS = ("--max-restarts", "1000000")


@dataclass(frozen=True)
class RecoveryLauncher:
    """A launcher with the options that make it recover."""

    launcher: Launcher
    loop: str  # name of a training loop in scripts/recover.py
    variables: dict[str, str] = field(default_factory=dict)
    learns: bool = False  # faster after a first run, in which it learns the imports of the script
    opt_in: bool = False  # takes part only where --contenders names it
    pause: float = 0.0  # seconds before each kill, until the next spare is ready

    def command(self, ranks: int, *, gpu: bool = False) -> list[str]:
        """Return the command line that starts the training; the caller appends its configuration."""
        command = self.launcher.command(ranks, script("recover.py"))
        return [word for word in command if word != "--cpu"] if gpu else command


def _restart(ranks: int, path: str) -> list[str]:
    *command, path = LAUNCHERS["phalanx"].command(ranks, path)
    return [*command, *_RESTARTS, path]


def _spare(ranks: int, path: str) -> list[str]:
    *command, path = LAUNCHERS["phalanx"].command(ranks, path)
    return [*command, "--spares", "1", path]


def _torchrun(ranks: int, path: str) -> list[str]:
    *command, path = LAUNCHERS["torchrun"].command(ranks, path)
    return [*command, *_RESTARTS, path]


def _torchft(ranks: int, path: str) -> list[str]:
    return [sys.executable, script("torchft_replicas.py"), str(ranks), path]


RECOVERY_LAUNCHERS = {
    one.launcher.name: one
    for one in (
        RecoveryLauncher(Launcher("phalanx", "phalanx", LAUNCHERS["phalanx"].command), "phalanx", learns=True),
        RecoveryLauncher(
            Launcher("spare", "phalanx, with a spare", _spare), "phalanx", learns=True, opt_in=True, pause=3.0
        ),
        RecoveryLauncher(Launcher("restart", "phalanx, plain script", _restart), "plain", learns=True),
        RecoveryLauncher(
            Launcher("torchrun", "torchrun, plain script", _torchrun),
            "plain",
            # Without it, restarted ranks read the addresses of dead ranks from a store that all attempts share.
            {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        ),
        RecoveryLauncher(Launcher("torchft", "torchft", _torchft, package="torchft"), "torchft"),
    )
}
