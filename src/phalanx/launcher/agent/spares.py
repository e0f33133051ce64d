"""Which device a spare waits on, and which spare replaces a dead rank: pure functions.

A worker that sees only one device (a MIG slice, `--isolate`) cannot change it once it has a CUDA context. A spare of
such a run is given a device when it starts: one that no rank uses, or else one that it shares with a living rank, whose
place it can take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.cluster.cluster import Slot


def slot(slots: Sequence[Slot], ranks: Sequence[Slot], spares: Sequence[Slot]) -> Slot:
    """Return the slot for the next spare. `slots`: all of this node; `ranks` and `spares`: those in use."""
    return min(slots, key=lambda one: (spares.count(one), ranks.count(one)))


def pick(wanted: Slot, spares: Mapping[str, Slot], ranks: Sequence[Slot]) -> str | None:
    """Return the spare that replaces a rank on the slot `wanted`. None: none fits. `ranks`: slots of living ranks."""
    fits = {name: one for name, one in spares.items() if one.device is None or one == wanted or one not in ranks}
    return min(fits, key=lambda name: fits[name] != wanted, default=None)
