"""Keeps updates that are not finite out of the state of a training: `phalanx run --on-nan rollback|stop`.

The losses and gradients of an update are checked before the optimizer uses them, so the state of the last committed
step still exists, and is finite. All ranks exchange their findings and make the same decision:

    rollback  drop the update and undo the changes of the forward (buffers); the batch counts as done, and is not
              repeated
    stop      raise `NonFiniteError` on all ranks, with a checkpoint of the last committed step if checkpoints are on

The resulting state is the one that a run would reach from a snapshot if it repeated all steps since then without this
batch. Only NaN and infinity count: no limit for a finite loss is right for every training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from phalanx.errors import CheckpointError, NonFiniteError, OptionError
from phalanx.train.kept.buffer_copies import BufferCopies
from phalanx.train.kept.kept_objects import KeptObjects, TrainingProgress

Policy = Literal["report", "rollback", "stop"]
MOST_SKIPPED = 3  # batches within WINDOW; another one stops the run
WINDOW = 100  # steps


@dataclass(frozen=True)
class Skip:
    """Drop the update and skip the batch."""


@dataclass(frozen=True)
class StopTraining:
    """Stop the run."""

    why: str


def decide(policy: Policy, step: int, skipped: Sequence[int], *, state_is_finite: bool) -> Skip | StopTraining:
    """Return the action for an update of `step` that is not finite. `skipped`: the steps skipped so far."""
    if not state_is_finite:
        return StopTraining("the parameters or buffers of the last committed step are not finite either")
    if policy == "stop":
        return StopTraining("--on-nan stop")
    recent = [each for each in skipped if each > step - WINDOW]
    if len(recent) >= MOST_SKIPPED:
        which = ", ".join(map(str, recent))
        return StopTraining(
            f"--on-nan rollback skips at most {MOST_SKIPPED} batches in {WINDOW} steps; skipped: {which}"
        )
    return Skip()


def checked_policy(text: str | None) -> Policy:
    """Return the policy that a variable names. Default: report."""
    match text or "report":
        case "report" | "rollback" | "stop" as policy:
            return policy
    raise OptionError(f'--on-nan is "{text}", expected report, rollback or stop', fix="--on-nan rollback")


def describe(found: Sequence[float], world_size: int) -> str:
    """Describe what is not finite. `found` has the `_Findings` of all ranks."""
    own, metric, _ = found
    if own:
        return f"the loss of rank {world_size - round(own)} is not finite"
    return "the loss is not finite" if metric else "the gradients are not finite"


class NonFiniteGuard:
    """Checks every update of a run, unless the policy is "report".

    save     saves a checkpoint of the last committed step, and returns its step; None: there are no checkpoints
    skipped  the steps that were skipped; part of the state, so that all ranks know them
    """

    def __init__(
        self,
        policy: Policy,
        device: torch.device,
        world_size: int,
        *,
        kept: KeptObjects,
        counter: TrainingProgress,
        save: Callable[[], int | None],
    ) -> None:
        self.skipped: list[int] = []
        self.latest: tuple[str, float] | None = None  # why the latest update was skipped, and what it cost
        self._policy = policy
        self._device = device
        self._world_size = world_size
        self._kept = kept
        self._counter = counter
        self._save = save
        self._losses: list[torch.Tensor] = []  # of this rank, since the last update
        self._metrics: list[Any] = []  # metrics of this step whose name contains "loss"
        self._buffers = BufferCopies(kept)
        self._begins = True  # no forward since the last update
        self._updated = 0.0  # when the last update was made
        self._error: NonFiniteError | None = None

    def before_forward(self) -> None:
        """Copy the buffers, if this is the first forward since the last update."""
        if self._begins:
            self._begins = False
            self._buffers.take()

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add a loss that is about to be used for gradients."""
        self._losses.append(loss.detach())

    def check_stopped(self) -> None:
        """Raise the error again that has stopped the run: the script may have caught it."""
        if self._error is not None:
            raise self._error

    def add_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Set the metrics of the current step."""
        self._metrics = [value for name, value in metrics.items() if "loss" in name.lower()]

    def refuses(self, parameters: Sequence[Any], *, scaled: bool) -> bool:
        """Return whether the update must not be made. Raises if the run must stop. All ranks must call it.

        `scaled`: the gradients are scaled for fp16, and the scaler handles infinite ones.
        """
        rank = self._world_size - (dist.get_rank() if self._world_size > 1 else 0)  # 0 is for "nothing found"
        gradients = [] if scaled else [parameter.grad for parameter in parameters if parameter.grad is not None]
        flags = [not_finite(self._losses, self._device), not_finite(self._metrics, self._device)]
        flags.append(not_finite(gradients, self._device))
        found = self._exchanged(torch.stack(flags) * rank)
        began, self._updated = self._updated, time.monotonic()
        self._losses, self._metrics, self._begins, self.latest = [], [], True, None
        if not any(found):
            return False
        self._roll_back(describe(found, self._world_size), self._updated - began if began else 0.0)
        return True

    def _exchanged(self, mine: torch.Tensor) -> list[float]:
        """Return the maximum over all ranks, for each value."""
        if self._world_size > 1:
            dist.all_reduce(mine, dist.ReduceOp.MAX)
        return [float(value) for value in mine.tolist()]

    def _roll_back(self, what: str, seconds: float) -> None:
        step = self._counter.steps + 1
        self._buffers.put_back()
        tensors = [each for model in self._kept.models for each in (*model.parameters(), *model.buffers())]
        (bad,) = self._exchanged(not_finite(tensors, self._device)[None])
        match decide(self._policy, step, self.skipped, state_is_finite=not bad):
            case Skip():
                self.skipped = [each for each in self.skipped if each > step - WINDOW] + [step]
                self.latest = what, seconds
            case StopTraining(why):
                self._kept.drop_unfinished_step()
                self.skipped = []  # a resumed run starts counting again
                raise self._stopped(f"stopped before the update of step {step}: {what}", why, save=not bad)

    def _stopped(self, what: str, why: str, *, save: bool) -> NonFiniteError:
        details = [why]
        try:
            saved = self._save() if save else None
        except CheckpointError as error:
            details.append(f"no checkpoint was written: {error.what}")
        else:
            details += [f"a checkpoint of step {saved} is on the disk"] if saved is not None else []
        fix = "a lower learning rate, run.step(opt, clip=1.0), or another look at the batch of that step"
        if save and self._policy == "stop":
            fix += "; --on-nan rollback skips the batch"
        self._error = NonFiniteError(what, details=details, fix=fix)
        return self._error


def not_finite(values: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Return 1 if one of the values is NaN or infinite, else 0, as a tensor, without waiting for a GPU.

    For a sharded tensor, this rank's shard is checked.
    """
    flag = torch.zeros((), device=device)
    tensors: list[torch.Tensor] = []
    with torch.no_grad():
        for value in values:
            if not isinstance(value, torch.Tensor):
                flag += 0.0 if abs(float(value)) < float("inf") else 1.0
                continue
            local = value.to_local() if hasattr(value, "to_local") else value
            local = local.coalesce().values() if local.is_sparse else local
            local = torch.view_as_real(local) if local.is_complex() else local
            if local.numel() and local.is_floating_point():
                tensors.append(local.detach())
        if tensors:
            precise = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
            extremes = torch.stack([each.to(device, precise) for each in _extremes(tensors)])
            flag += (~torch.isfinite(extremes)).any()
    return flag.clamp(max=1.0)


def _extremes(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return numbers that are all finite only if all tensors are. The fastest way differs between devices."""
    if all(tensor.is_cuda for tensor in tensors):
        return list(torch._foreach_norm(tensors, float("inf")))
    return [extreme for tensor in tensors for extreme in torch.aminmax(tensor)]
