"""Detects mistakes in a script that raise no error. Each is reported once, at the script's line, with what to type.

The checks cover the first steps only.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from phalanx.train.data.loader import Loader
from phalanx.train.data.loader_options import name_of
from phalanx.train.kept.kept_objects import KeptObjects
from phalanx.train.misuse.comparison import RankComparison
from phalanx.train.misuse.samples import iterated_data
from phalanx.train.model.wrapped import Wrapped
from phalanx.train.script_warnings import ScriptWarnings
from phalanx.worker.rendezvous.membership import Membership

NO_GRADIENT = (
    "no parameter of this optimizer has a gradient, so the step changes nothing: "
    "run.backward(loss) before run.step(opt)"
)
NOT_KEPT = (
    "run.keep was not called, so the training starts again from the beginning when a rank dies: "
    "run.keep(model, opt, data) before the loop"
)
LOADER_NOT_KEPT = (
    "the loader of {dataset} was not given to run.keep, so its epoch starts again after a failure: "
    "run.keep({kept}, loader) before the loop"
)
NOT_COMMITTED = (
    "opt.step() updates this rank and commits nothing: no progress, no checkpoints, and batches are read again after a "
    "failure: run.step(opt, loss=loss) in place of opt.step()"
)
NOT_IN_STEP = (
    "scheduler.step() after run.step(opt) is not part of the committed step, so a training that resumes from it has "
    "the learning rate of the step before: run.step(opt, scheduler=scheduler, loss=loss) in place of both"
)


_BY_HAND = 10  # calls of opt.step() outside of run.batches: a few may be a warm-up


class MisuseChecks:
    """Checks the first steps of a script. `done` when there is nothing more to check."""

    def __init__(self, membership: Membership, kept: KeptObjects, warnings: ScriptWarnings, *, survives: bool) -> None:
        self.done = False
        self._comparison = RankComparison(membership)
        self._warnings = warnings if membership.placement.rank == 0 else None
        self._kept = kept
        self._survives = survives  # a rank that dies is replaced, and this is the first time that `train` is called
        self._hook: Any = None
        self._uncommitted = 0  # calls of opt.step() before the first run.step
        self._most = _BY_HAND  # of these, without a warning
        self._stepped = False  # run.step was called
        self._commits = 0
        self._scheduled: list[int] | None = None  # updates that each kept scheduler had counted at the first commit

    # -- called by the run

    def reading(self) -> None:
        """Handle the start of a loop of `run.batches`: watch for `opt.step()` until the first `run.step`."""
        if self._most == _BY_HAND and torch.is_grad_enabled():
            self._most, self._uncommitted = 2, 0  # the first one may be part of something else
        self.wrapped()

    def wrapped(self) -> None:
        """Handle that a model was wrapped: watch for `opt.step()` until the first `run.step`."""
        if self._hook is None and not self._stepped and torch.is_grad_enabled():
            here = weakref.ref(self)

            def stepped(optimizer: Any, *_: object) -> None:
                checks = here()
                if checks is not None and not torch.compiler.is_compiling():
                    checks._optimizer_stepped(optimizer)

            self._hook = register_optimizer_step_post_hook(stepped)

    def stepping(self, opt: Any) -> None:
        """Handle the start of `run.step(opt)`."""
        self.unhook()
        if self._stepped:
            return
        self._stepped = True
        if not self._comparison.done and not any(isinstance(model, Wrapped) for model in self._kept.models):
            self._comparison.take_parameters([one for group in opt.param_groups for one in group["params"]])

    def first_forward(self, given: Any) -> None:
        """Handle the first call of a wrapped model, with these arguments."""
        self._comparison.take_arguments(given)

    def committed(self, data: Any, loaders: Sequence[Loader], *, idle: bool, saved: bool) -> None:
        """Handle a step that `run.step` has committed, with a batch of `data`.

        loaders  those that are being read
        idle     an optimizer found no gradient
        saved    there are checkpoints, from which a later run resumes
        """
        self._commits += 1
        if idle:
            self._tell("gradient", NO_GRADIENT)
        if self._commits == 1:
            if self._survives and not self._kept.objects:
                self._tell("keep", NOT_KEPT)
            if (self._survives or saved) and self._kept.objects:
                self._check_loaders(loaders)
            if (isinstance(data, DataLoader) or data is None) and not self._comparison.done:
                read = iterated_data()
                self._comparison.take_data(read if data is None else data, drawn=read.drawn if read else 0)
            self._scheduled = self._updates_counted()
        for found in self._comparison.committed(self._commits):
            self._tell(*found)
        self.done = self._comparison.done

    def batch_done(self) -> None:
        """Handle the request for the next batch: the script has done everything for the current step."""
        if self._scheduled is not None:
            if self._scheduled != self._updates_counted():
                self._tell("scheduler", NOT_IN_STEP)
            self._scheduled = None

    def unhook(self) -> None:
        """Stop watching for `opt.step()`."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def close(self) -> None:
        """Read the values of the other ranks a last time."""
        self.unhook()
        for found in self._comparison.close():
            self._tell(*found)

    # -- the checks

    def _tell(self, subject: str, text: str) -> None:
        if self._warnings is not None:
            self._warnings.warn(subject, text)

    def _check_loaders(self, loaders: Sequence[Loader]) -> None:
        for loader in loaders:
            if loader.tail != "every" and not self._kept.contains(loader):
                kept = ", ".join(self._kept.objects)
                self._tell("loader", LOADER_NOT_KEPT.format(dataset=name_of(loader.dataset), kept=kept))

    def _updates_counted(self) -> list[int]:
        return [kept.last_epoch for kept in self._kept.objects.values() if isinstance(kept, LRScheduler)]

    def _optimizer_stepped(self, optimizer: Any) -> None:
        if self._uncommitted >= self._most or (self._most == _BY_HAND and not self._trains_kept(optimizer)):
            return
        self._uncommitted += 1
        if self._uncommitted == self._most:  # the hook stays: torch is iterating over the hooks
            self._tell("uncommitted", NOT_COMMITTED)

    def _trains_kept(self, optimizer: Any) -> bool:
        """Return whether an optimizer updates a model that was wrapped or kept."""
        updated = {id(one) for group in optimizer.param_groups for one in group["params"]}
        return any(id(one) in updated for model in self._kept.models for one in model.parameters())
