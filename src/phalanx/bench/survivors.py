"""Who goes on after a kill: the command that keeps a training of N ranks alive, and what it needs for that."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field

from phalanx.bench.contenders import CONTENDERS, Contender

_SCRIPTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "scripts")
_OFTEN = ("--max-restarts", "1000000")


@dataclass(frozen=True)
class Survivor:
    contender: Contender
    loop: str  # of scripts/recover.py
    variables: dict[str, str] = field(default_factory=dict)
    learns: bool = False  # it knows better after a first run
    asked: bool = False  # it takes part only where it is named

    def line(self, ranks: int, *, gpu: bool = False) -> list[str]:
        line = self.contender.line(ranks, os.path.join(_SCRIPTS, "recover.py"))
        return [word for word in line if word != "--cpu"] if gpu else line


def _restart(ranks: int, script: str) -> list[str]:
    *line, script = CONTENDERS["phalanx"].line(ranks, script)
    return [*line, *_OFTEN, script]


def _spare(ranks: int, script: str) -> list[str]:
    *line, script = CONTENDERS["phalanx"].line(ranks, script)
    return [*line, "--spares", "1", script]


def _torchrun(ranks: int, script: str) -> list[str]:
    *line, script = CONTENDERS["torchrun"].line(ranks, script)
    return [*line, *_OFTEN, script]


def _torchft(ranks: int, script: str) -> list[str]:
    return [sys.executable, os.path.join(_SCRIPTS, "replicas.py"), str(ranks), script]


SURVIVORS = {
    survivor.contender.name: survivor
    for survivor in (
        Survivor(Contender("phalanx", "phalanx", CONTENDERS["phalanx"].line), "phalanx", learns=True),
        Survivor(Contender("spare", "phalanx, a spare", _spare), "phalanx", learns=True, asked=True),
        Survivor(Contender("restart", "phalanx, plain script", _restart), "plain", learns=True),
        Survivor(
            Contender("torchrun", "torchrun, plain script", _torchrun),
            "plain",
            # Else restarted ranks read the addresses of the dead ones, from a store that all attempts share.
            {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        ),
        Survivor(Contender("torchft", "torchft", _torchft, package="torchft"), "torchft"),
    )
}
