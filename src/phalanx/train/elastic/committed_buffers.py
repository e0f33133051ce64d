"""The buffers of the last committed step, such as the running mean of a batch normalization.

A forward changes buffers before its step is committed, and a step that is lost is repeated. So they are copied when the
script gets a batch, which is what it repeats: any forward may come first, such as that of a generator without
gradients, or of a teacher that is not wrapped. Without `run.batches` they are copied before the first forward.

With DDP the buffers of rank 0 count, which DDP sends to the others before the next forward. They are sent before the
update that ends the step instead, so that they outlive rank 0, and before the check that the group was not lost: NCCL
does not raise.
"""

from __future__ import annotations

from phalanx.train.kept.buffer_copies import BufferCopies
from phalanx.train.kept.kept_objects import KeptObjects, TrainingProgress
from phalanx.train.stepping.stepper import Stepper


class CommittedBuffers:
    """Copies of the buffers as of the last committed step."""

    def __init__(self, kept: KeptObjects, counter: TrainingProgress, stepper: Stepper) -> None:
        self._kept = kept
        self._counter = counter
        self._stepper = stepper
        self._copies = BufferCopies(kept)
        self._taken = -1  # the committed step of which there are copies
        self._settled = False
        stepper.hooks.before_batch.append(self._begin_batch)
        stepper.hooks.before_forward.append(self._take)
        stepper.hooks.before_last_update.append(self._share)

    def put_back(self) -> None:
        """Undo what forwards have changed since the last committed step."""
        if self._taken == self._counter.steps:
            self._copies.put_back()

    def close(self) -> None:
        """Make no more copies."""
        hooks = self._stepper.hooks
        hooks.before_batch.remove(self._begin_batch)
        hooks.before_forward.remove(self._take)
        hooks.before_last_update.remove(self._share)

    def _begin_batch(self, first: bool) -> None:
        """`first`: of an epoch. The script may have changed buffers at the end of the last one, with no step since."""
        unused = self._stepper.stepped and not self._stepper.waiting  # no forward since the last update
        if first and unused and self._taken == self._counter.steps:
            self._copies.take()
        self._take()

    def _take(self) -> None:
        step = self._counter.steps
        if step == self._taken or not self._kept.ready:
            return
        if not self._settled and self._taken >= 0:
            self._settled = True
            self._copies.settle()
        self._copies.take()
        self._taken = step

    def _share(self) -> None:
        for model in self._stepper.models:
            model.share_buffers()
