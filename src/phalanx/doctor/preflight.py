"""Runs the cheap checks before every launch. Prints nothing if it finds no problem."""

from __future__ import annotations

from phalanx.doctor.checks import disk, limits, names, shared_memory
from phalanx.doctor.finding import Finding

_PATIENCE = 0.05  # seconds for a name server; `phalanx doctor` reports a slow one


def preflight(
    run_folder_base: str,
    *,
    nodes: int,
    ranks: int = 0,
) -> list[Finding]:
    """Return problems that prevent a launch or soon will. `ranks`: number of ranks on this node."""
    found = [
        *disk.judge(disk.read(run_folder_base)),
        *shared_memory.judge(shared_memory.read(), brief=True),
        *limits.judge(limits.read(), ranks=ranks),
    ]
    if nodes > 1:
        found += _name()
    return [finding for finding in found if finding.level != "green"]


def _name() -> list[Finding]:
    """Check the host name. A name that resolves to loopback is no finding: phalanx gives ranks a reachable address."""
    own = names.read(patience=_PATIENCE, backward=False)
    return names.judge(own) if own.answered and own.trouble else []
