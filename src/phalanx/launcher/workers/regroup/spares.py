"""Spare workers: the device on which a spare waits, which one replaces a dead rank, and keeping enough of them.

A worker that sees only one device (a MIG slice, `--isolate`) cannot change it once it has a CUDA context. A spare of
such a run is given a device when it starts: one that no rank uses, or else one that it shares with a live rank, which
it can replace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count

from phalanx.cluster.cluster import Slot
from phalanx.cluster.placement import Seat
from phalanx.contract.ranks.placement import RankPlacement
from phalanx.launcher.runs import root_cause
from phalanx.launcher.workers.formation import Formation
from phalanx.launcher.workers.spawner import Spawner
from phalanx.launcher.workers.worker import Worker
from phalanx.launcher.workers.workers import Workers

_MOST_LOST = 3  # per attempt: a spare that cannot start would be replaced forever


def slot(slots: Sequence[Slot], ranks: Sequence[Slot], spares: Sequence[Slot]) -> Slot:
    """Return the slot for the next spare. `slots`: all of this node; `ranks` and `spares`: those in use."""
    return min(slots, key=lambda one: (spares.count(one), ranks.count(one)))


def pick(wanted: Slot, spares: Mapping[str, Slot], ranks: Sequence[Slot]) -> str | None:
    """Return the spare that replaces a rank on the slot `wanted`. None: none matches. `ranks`: slots of live ranks."""
    fits = {name: one for name, one in spares.items() if one.device is None or one == wanted or one not in ranks}
    return min(fits, key=lambda name: fits[name] != wanted, default=None)


class SparePool:
    """Keeps the spare workers that a plan requests."""

    def __init__(self, workers: Workers, spawner: Spawner, note: Callable[[str], None]) -> None:
        self._workers = workers
        self._spawner = spawner
        self._note = note
        self._lost = 0

    def keep(self, formation: Formation) -> None:
        """Start missing spares. The script must be able to regroup: others would begin to train."""
        plan = formation.plan
        if plan.group.spare or self._lost >= _MOST_LOST:
            return
        living = self._workers.living
        taken = {worker.seat.local_rank for _, worker in living}
        free = (place for place in count(len(plan.seats)) if place not in taken)
        for _ in range(plan.group.spares.count - sum(worker.spare for _, worker in living)):
            place = next(free)
            one = Slot()
            if plan.devices.isolated:
                slots = dict.fromkeys([*(seat.slot for seat in plan.seats), *plan.group.spares.slots])
                one = slot([*slots], self._slots(spare=False), self._slots(spare=True))
            placement = RankPlacement(
                rank=plan.group.world_size + place - len(plan.seats),
                world_size=plan.group.world_size,
                local_rank=place,
                local_world_size=len(plan.seats),
                node_rank=plan.group.node_rank,
                node_count=plan.group.node_count,
            )
            self._spawner.start(formation, Seat(placement, one), spare=True)

    def take(self, wanted: Slot) -> str | None:
        """Return the name of a spare that can replace a rank on the slot `wanted`. None: none matches."""
        living = self._workers.living
        ready = {name: worker.seat.slot for name, worker in living if worker.spare and worker.connected}
        return pick(wanted, ready, self._slots(spare=False))

    def exited(self, formation: Formation, name: str, worker: Worker, code: int) -> bool:
        """Replace a spare that has ended. Return False if that is useless, on a node with only spares.

        There an exit code means that the script does not start: the node cannot take part.
        """
        self._lost += 1
        if formation.plan.group.spare and (code > 0 or self._lost >= _MOST_LOST):
            return False
        self._workers.forget(name)
        text = f"a spare worker ended ({root_cause.in_words(code)}); see {worker.folder}"
        if self._lost >= _MOST_LOST:
            self._note(f"{text}. It is the third: no more spares are started")
        else:
            self._note(text)
            self._spawner.start(formation, worker.seat, spare=True)
        return True

    def _slots(self, *, spare: bool) -> list[Slot]:
        return [worker.seat.slot for _, worker in self._workers.living if worker.spare == spare]
