"""Optimizer steps over windows of micro-batches: when gradients are averaged, clipped and scaled.

    stepper = Stepper()
    stepper.add(wrapped)
    stepper.backward(loss)                     # loss.backward() works too, except for fp16
    stepper.step(opt, accumulate=4, clip=1.0)  # every fourth call updates

The gradient of an update is the mean over the samples of all ranks and micro-batches. If ranks have different batch
sizes, use `weights.weigh(loss, count, total)` with the samples of this rank and of all ranks in this micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from phalanx.errors import UsageError
from phalanx.train.data.rng import FreshRng
from phalanx.train.stepping.loss_scaling import LossScaling
from phalanx.train.stepping.sample_weights import SampleWeights


class SteppedModel(Protocol):
    """A wrapped model, as far as the stepper needs it."""

    world_size: int
    precision: Any
    accumulate: int
    synchronised: bool  # the current backward averages gradients
    wanted: bool  # the next one does

    @property
    def layout(self) -> Any:
        """The layout of DDP's buckets."""
        ...

    def synchronise(self, on: bool) -> None:
        """Set whether the next backward averages gradients."""
        ...

    def share_buffers(self) -> None:
        """Give all ranks the buffers of rank 0."""
        ...

    def adopt(self, opt: Any) -> None:
        """Give an optimizer the parameters that there are now."""
        ...

    def holds(self, parameters: list[Any]) -> bool:
        """Return whether one of these is a parameter of the model."""
        ...

    def parameters(self) -> Any:
        """Return the parameters."""
        ...


class UpdateGuard(Protocol):
    """Decides whether an update is made."""

    skipped: list[int]  # steps without an update, as part of the state

    def refuses(self, parameters: Sequence[Any], *, scaled: bool) -> bool:
        """Return whether the update must be skipped. `scaled`: gradients are scaled for fp16."""
        ...


class OptimizerUpdate(NamedTuple):
    """The result of `run.step`."""

    done: bool  # the parameters have changed
    # There was no update. fp16: a gradient was infinite, and the scale is reduced. `--on-nan rollback`: a loss or a
    # gradient was not finite.
    skipped: bool = False
    norm: Any = None  # with clip: of the gradient before clipping, as a tensor, to avoid waiting for the GPU


WAITING, DONE, SKIPPED = OptimizerUpdate(False), OptimizerUpdate(True), OptimizerUpdate(False, True)


@dataclass(slots=True)
class MicroBatchWindow:
    """The micro-batches of one optimizer since its last update."""

    models: list[SteppedModel]
    parameters: list[Any]
    groups: int
    accumulate: int
    batches: int = 0
    divisor: float = 0.0  # number of full micro-batches they amount to
    seen: int = 0  # the number of the last one
    updated: bool = False
    partial: bool = False  # the update is only a part of a step


@dataclass(slots=True)
class MicroBatch:
    """The micro-batch since the last forward."""

    number: int = 0
    ending: bool = False  # it is the last one of its epoch
    scaled: bool = False  # `backward` was called for it, not `loss.backward()`


@dataclass(slots=True)
class StepHooks:
    """Functions that are called during a step. All but the first two may raise."""

    # before a batch of the training is used, and at the end of an epoch; called with whether it is the first batch
    before_batch: list[Callable[[bool], None]] = field(default_factory=list)
    before_forward: list[Callable[[], None]] = field(default_factory=list)  # before the first forward of a step
    before_last_update: list[Callable[[], None]] = field(default_factory=list)  # before the update that ends a step
    before_update: list[Callable[[], None]] = field(default_factory=list)  # then, before gradients are used
    before_commit: Callable[[Any, Any], None] | None = None  # with optimizer and scheduler
    guard: UpdateGuard | None = None  # asked before every update
    first_forward: Callable[[Any], None] | None = None  # called once, with the arguments of the first forward

    def __reduce__(self) -> Any:
        """Pickle no hooks, for example in `torch.save(ddp)`: they belong to the run."""
        return StepHooks, ()


class Stepper:
    """Steps all optimizers and wrapped models of a script."""

    def __init__(self, world_size: int = 1) -> None:
        self.stepped = True  # since the last forward: the next one begins a micro-batch
        self.ends = False  # set by the reader of batches: this micro-batch is the last one of its epoch
        self.accumulate = 1  # of the latest window
        self.idle = False  # the first update of an optimizer found no gradient
        self.torn = False  # an update has begun and its step is not committed; reset by the commit
        self.ranks_before: int | None = None  # the world size of the loaded state
        self.hooks = StepHooks()
        self.fresh = FreshRng()
        self.scaling = LossScaling()
        self.weights = SampleWeights(world_size)
        self._ranks = world_size
        self._models: list[SteppedModel] = []
        self._windows: dict[int, tuple[Any, MicroBatchWindow]] = {}
        self._latest: tuple[Any, MicroBatchWindow | None] = (None, None)
        self._micro_batch = MicroBatch()

    def add(self, wrapped: SteppedModel, accumulate: int = 1) -> None:
        """Add a wrapped model."""
        _positive(accumulate)
        self._models.append(wrapped)
        self._forget()
        self.accumulate = accumulate
        self.weights.world_size = wrapped.world_size
        self.scaling.begin(wrapped.precision)
        wrapped.synchronise(accumulate == 1)

    def remove(self, wrapped: SteppedModel) -> None:
        """Remove a wrapped model."""
        self._models = [model for model in self._models if model is not wrapped]
        self._forget()

    @property
    def models(self) -> list[SteppedModel]:
        """The wrapped models."""
        return list(self._models)

    @property
    def layouts(self) -> list[list[list[int]]]:
        """The bucket layouts of the models, in the order in which they were wrapped."""
        return [model.layout for model in self._models]

    def adopt(self, opt: Any) -> None:
        """Give an optimizer that was created before FSDP sharded the model the current parameters."""
        for model in self._models:
            model.adopt(opt)

    def begin(self) -> None:
        """Begin a micro-batch, at the first forward after a step: several optimizers may step after one backward."""
        micro_batch = self._micro_batch
        self.stepped = micro_batch.scaled = False
        micro_batch.number += 1
        micro_batch.ending = self.ends
        self.weights.share = 1.0
        if self.scaling.outdated:
            self._update_scale()
        for call in tuple(self.hooks.before_forward):  # one may remove itself
            call()
        for model in self._models:
            want = model.wanted or micro_batch.ending
            if model.synchronised is not want:
                model.synchronise(want)

    def finish(self) -> None:
        """Make the next micro-batch the last one of its window, as at the end of an epoch."""
        self.begin()
        self._micro_batch.ending = True
        for model in self._models:
            model.synchronise(True)

    @property
    def scaled(self) -> bool:
        """Whether `backward` was called for the current micro-batch, not `loss.backward()`."""
        return self._micro_batch.scaled

    def backward(self, loss: Any, **options: Any) -> None:
        """Call `loss.backward()`, scaled for fp16."""
        self._micro_batch.scaled = True
        if self.scaling.scaler is not None:
            loss = self.scaling.scaler.scale(loss)
        loss.backward(**options)

    def step(
        self,
        opt: Any,
        *,
        accumulate: int | None = None,
        clip: float | None = None,
        scheduler: Any = None,
        commit: bool = True,
    ) -> OptimizerUpdate:
        """Count a micro-batch, and update if its window is full. `commit`: the update completes a step."""
        latest, window = self._latest
        if latest is not opt or window is None or len(opt.param_groups) != window.groups:
            window = self._enter(opt)
        if accumulate is None:
            accumulate = window.accumulate
        elif accumulate != window.accumulate:
            _positive(accumulate)
            window.accumulate = accumulate
        self.accumulate = accumulate
        micro_batch, ending = self._micro_batch, self.ends
        if window.models:
            if window.seen == micro_batch.number or (self.scaling.scaler is not None and not micro_batch.scaled):
                self._refuse(window)
            ending = micro_batch.ending
        self.stepped = True
        window.seen = micro_batch.number
        window.batches += 1
        window.divisor += self.weights.share
        update = WAITING
        # A window that was made shorter ends with the first backward that averaged gradients.
        if (window.batches >= accumulate or ending) and _synchronised(window.models):
            update = self._update(opt, window, clip, scheduler, commit=commit)
            window.batches, window.divisor = 0, 0.0
            if len(self._windows) == 1 or not self.waiting:
                self.weights.end_window()
        want = window.batches + 1 >= accumulate
        for model in window.models:
            if model.wanted is not want:
                model.__dict__["wanted"] = want
        return update

    def _update(
        self, opt: Any, window: MicroBatchWindow, clip: float | None, scheduler: Any, *, commit: bool
    ) -> OptimizerUpdate:
        hooks = self.hooks
        window.partial |= not commit
        for call in (*(hooks.before_last_update if commit else ()), *hooks.before_update):
            call()
        if not window.updated:
            window.updated = True
            self.idle |= all(parameter.grad is None for parameter in window.parameters)
        if hooks.guard is not None and hooks.guard.refuses(window.parameters, scaled=self.scaling.scaler is not None):
            return self._skip(opt, commit=commit)
        norm = None
        if self.scaling.scaler is not None or clip is not None or window.divisor != 1.0:
            norm = self._adjust_gradients(opt, window, clip)
        if hooks.before_commit is not None and commit and not self.torn:  # several updates are only repeated together
            hooks.before_commit(opt, scheduler)
        done = self.apply(opt, scheduler)
        return DONE if done and norm is None else OptimizerUpdate(done, not done, norm)

    def _skip(self, opt: Any, *, commit: bool) -> OptimizerUpdate:
        """Make no update. Without gradients, an update that is made late changes nothing either."""
        opt.zero_grad(set_to_none=True)
        if self.hooks.before_commit is not None and commit and not self.torn:
            self.hooks.before_commit(opt, None)
        return SKIPPED

    def _adjust_gradients(self, opt: Any, window: MicroBatchWindow, clip: float | None) -> Any:
        """Unscale, average over the window and clip; return the norm if they are clipped."""
        grads = [parameter.grad for parameter in window.parameters if parameter.grad is not None]
        if self.scaling.scaler is not None:
            self.scaling.scaler.unscale_(opt)
        if clip is not None:
            return clipped(grads, window.divisor, clip)
        if window.divisor != 1.0 and grads:
            torch._foreach_div_(grads, window.divisor)
        return None

    def apply(self, opt: Any, scheduler: Any) -> bool:
        """Update the parameters from gradients that are complete; return False if fp16 has overflowed."""
        done = self.torn = True
        if self.scaling.scaler is None:
            opt.step()
        else:
            done = self.scaling.step(opt)
        opt.zero_grad(set_to_none=True)
        if scheduler is not None and done:
            scheduler.step()
        return done

    @property
    def several(self) -> bool:
        """Whether a step has several updates."""
        return any(window.partial for _, window in self._windows.values())

    @property
    def waiting(self) -> bool:
        """Whether there are gradients that no update has used."""
        return any(window.batches for _, window in self._windows.values())

    def _update_scale(self) -> None:
        """Update the scale, when no other optimizer has gradients of the old one."""
        if self.scaling.outdated and not self.waiting:
            self.scaling.update()

    def _refuse(self, window: MicroBatchWindow) -> None:
        if window.seen == self._micro_batch.number:
            raise UsageError(
                "the wrapped model was not called since this optimizer's last step",
                details=["a call of the model itself does not average gradients over the ranks"],
                fix="ddp = run.wrap(model), and then ddp(x) in place of model(x)",
            )
        raise UsageError(
            "fp16: the loss of this step was not scaled, so small gradients are lost",
            fix="run.backward(loss) in place of loss.backward()",
        )

    def _enter(self, opt: Any) -> MicroBatchWindow:
        _, window = self._windows.get(id(opt), (None, None))
        if window is None or len(opt.param_groups) != window.groups:
            self.adopt(opt)
            parameters = [parameter for group in opt.param_groups for parameter in group["params"]]
            models = [model for model in self._models if model.holds(parameters)]
            if self._models and not models:
                raise UsageError(
                    "the optimizer has no parameter of a wrapped model: its steps would change nothing",
                    fix="opt = torch.optim.AdamW(model.parameters()), with the model that was wrapped",
                )
            accumulate = max((model.accumulate for model in models), default=1)
            fresh = MicroBatchWindow(models, parameters, len(opt.param_groups), accumulate)
            if window is not None:
                fresh.accumulate, fresh.seen = window.accumulate, window.seen
                fresh.batches, fresh.divisor = window.batches, window.divisor
                fresh.updated, fresh.partial = window.updated, window.partial
            window = fresh
            self._windows[id(opt)] = opt, window
        self._latest = opt, window
        return window

    def _forget(self) -> None:
        self._windows.clear()
        self._latest = (None, None)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scaler, and everything else that a resumed run needs."""
        self._update_scale()
        return {
            "scaler": self.scaling.state_dict(),
            "drawn": self.fresh.drawn,
            "ranks": self._ranks,
            **({"skipped": self.hooks.guard.skipped} if self.hooks.guard is not None else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state, before models are wrapped or after."""
        self.scaling.load_state_dict(state.get("scaler") or {})
        self.fresh.drawn = state.get("drawn", self.fresh.drawn)
        self.ranks_before = state.get("ranks", self.ranks_before)
        if self.hooks.guard is not None:
            self.hooks.guard.skipped = list(state.get("skipped", []))


def clipped(grads: list[Any], divisor: float, most: float) -> Any:
    """Divide gradients by `divisor`, and clip their norm to `most`, in one pass. Return the norm before clipping: over
    all parameters and, with FSDP, the shards of all ranks."""
    norm = torch.nn.utils.get_total_norm(grads)
    if hasattr(norm, "full_tensor"):
        norm = norm.full_tensor()
    if divisor != 1.0:
        norm = norm / divisor
    shrink = torch.clamp(most / (norm + 1e-6), max=1.0)
    if grads:
        torch._foreach_mul_(grads, shrink if divisor == 1.0 else shrink / divisor)
    return norm


def _synchronised(models: list[SteppedModel]) -> bool:
    for model in models:  # noqa: SIM110 - a generator costs more than all the rest of a step
        if not model.synchronised:
            return False
    return True


def _positive(accumulate: int) -> None:
    if not hasattr(accumulate, "__index__") or accumulate < 1:
        raise UsageError(f"accumulate={accumulate!r}: expected 1 or more", fix="accumulate=1")
