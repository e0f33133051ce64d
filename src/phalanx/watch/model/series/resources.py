"""Usage of CPUs, memory and GPUs by the ranks, over time."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.contract import events
from phalanx.watch.model.series.curve import Curve

CPU = "CPU cores, all ranks"
MEMORY = "memory GiB, all ranks"
GPU = "GPU %, mean"
GPU_MEMORY = "GPU memory GiB, largest rank"
RESOURCES = (CPU, MEMORY, GPU, GPU_MEMORY)
_GIB = 1 << 30


@dataclass
class Resources:
    """Curves of resource usage. Call `sampled` with each sample."""

    curves: dict[str, Curve] = field(default_factory=dict)

    def sampled(self, event: events.ClusterSample, step: int) -> None:
        """Add a point to each curve. `step`: step of the run; -1: none yet."""
        living = [rank for rank in event.ranks if rank.state not in ("X", "E")]
        if not living:
            return
        step = max(0, step)
        cores = sum(rank.cpu for rank in living)
        if cores or CPU in self.curves:  # the first sample of a process has no rate yet
            self._add(CPU, step, event.time, cores)
        self._add(MEMORY, step, event.time, sum(rank.memory for rank in living) / _GIB)
        used = [rank.gpu for rank in living if rank.gpu >= 0]
        if used:
            self._add(GPU, step, event.time, 100 * sum(used) / len(used))
        most = max(rank.gpu_memory for rank in living)
        if most:
            self._add(GPU_MEMORY, step, event.time, most / _GIB)

    def _add(self, name: str, step: int, when: float, value: float) -> None:
        self.curves.setdefault(name, Curve()).add(step, when, round(value, 4))
