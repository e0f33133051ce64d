"""The buffers of the last committed step, such as the running mean of a batch normalization.

A forward changes buffers before its step is committed, and a step that is lost is repeated. With DDP the buffers of
rank 0 count, which DDP sends to the others before the next forward. They are sent before the update that ends the step
instead, so that they outlive rank 0, and before the check that the group was not lost: NCCL does not raise.
"""

from __future__ import annotations

from phalanx.train.kept.buffer_copies import BufferCopies
from phalanx.train.kept.kept_objects import KeptObjects, TrainingProgress
from phalanx.train.stepping.stepper import Stepper


class CommittedBuffers:
    """Copies of the buffers as of the last committed step, from the first forward after it."""

    def __init__(self, kept: KeptObjects, counter: TrainingProgress, stepper: Stepper) -> None:
        self._kept = kept
        self._counter = counter
        self._stepper = stepper
        self._copies = BufferCopies(kept)
        self._taken = -1  # the committed step of which there are copies
        stepper.hooks.before_forward.append(self._take)
        stepper.hooks.before_last_update.append(self._share)

    def put_back(self) -> None:
        """Undo what forwards have changed since the last committed step."""
        if self._taken == self._counter.steps:
            self._copies.put_back()

    def close(self) -> None:
        """Make no more copies."""
        self._stepper.hooks.before_forward.remove(self._take)
        self._stepper.hooks.before_last_update.remove(self._share)

    def _take(self) -> None:
        step = self._counter.steps
        if step == self._taken or not self._kept.ready:
            return
        if self._taken == self._counter.start:
            self._copies.drop_constants()
        self._copies.take()
        self._taken = step

    def _share(self) -> None:
        for model in self._stepper.models:
            model.share_buffers()
