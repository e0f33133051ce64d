"""A training over the generations of its group: when a rank dies, `train` is entered again, with what it keeps.

The supervisor knows of a death first, and says where everybody stands now. What the old group was held together by is
cut, so that whoever waits in a collective of it stops waiting; whatever exception that raises in the script is not the
script's fault, and ends its turn.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

from phalanx.contract import line as words
from phalanx.join import gloo
from phalanx.join.line import Line
from phalanx.join.severing import Severing
from phalanx.train.handover import Past
from phalanx.train.run import Run

Result = TypeVar("Result")
STUCK = 2.0  # seconds in a group that is cut, after which a thread of gloo's may wait for nobody
PATIENCE = 10.0  # seconds for the supervisor to tell of a death that a rank has felt before


class Generations:
    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self._options = options
        self._excepthook = sys.excepthook
        self._severing = Severing()
        self._run: Run | None = None
        self._past: Past | None = None
        self._forming = 0  # or formed: the generation that this process is in
        self._since = time.monotonic()  # it was last in the newest one
        self._line = Line(name, self._severing.cut, self._pulse)

    def live(self, train: Callable[[Run], Result]) -> tuple[Run, Result]:
        """Through as many generations as it takes. The run is still open when it returns or raises."""
        while True:
            world = self._line.world
            self._forming = world.generation
            try:
                run = self._begin(world)
                result = train(run)
                run.finish()
                self._line.tell(words.Done())
                return run, result
            except Exception as error:
                # A rank may feel that another has died before it is told so; what the script itself has done is told
                # at once.
                newer = self._line.newer(world.generation, PATIENCE if _may_be_a_death(error) else 0.0)
                if newer is None:
                    raise
            self._leave()
            sys.excepthook = self._excepthook  # torch puts one of its own around it for every group

    def _begin(self, world: words.World) -> Run:
        with self._severing.watching():
            run = Run.join(**self._options, world=world)
        self._run = run
        run.seed_everything()
        run.generation = world.generation
        run.past = self._past
        run.committed = lambda step: self._line.tell(words.Going(world.generation, step))
        if self._line.world.generation > world.generation:  # it was cut before there was anything to cut
            self._severing.cut()
        return run

    def _leave(self) -> None:
        run, self._run = self._run, None
        if run is None:  # it never came to be
            self._destroy()
            return
        self._past = run.standing() or self._past
        self._severing.cut()
        run.abandon()
        self._severing.forget()

    def _destroy(self) -> None:
        """A group that was half formed."""
        import torch.distributed as dist

        with contextlib.suppress(Exception):
            if dist.is_initialized():
                dist.destroy_process_group()
        # torch has counted it, though it never came to be: the next one would not be called as a new rank calls it.
        dist.distributed_c10d._world.group_count = 0
        self._severing.forget()

    def _pulse(self) -> int:
        """Called by the line's thread now and then: how many steps are committed."""
        run, now = self._run, time.monotonic()
        if not self._behind():
            self._since = now
        elif run is None:
            self._severing.cut()  # again: what it waits for now may not have been there the first time
        if now - self._since > STUCK:
            self._since = now
            gloo.end_sends(self._behind)
        return 0 if run is None else run.steps

    def _behind(self) -> bool:
        """The others form a new group, and this process is still in the old one."""
        return self._line.world.generation > self._forming

    @property
    def run(self) -> Run | None:
        return self._run

    def close(self) -> None:
        self._line.close()


def _may_be_a_death(error: Exception) -> bool:
    """torch tells of a lost peer in many words, but always by these kinds."""
    return isinstance(error, RuntimeError | OSError) or type(error).__module__.startswith("phalanx.")
