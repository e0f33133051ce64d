"""One optimizer step over the micro-batches of its window: when ranks synchronise, what is averaged, clipped, scaled.

    stepper = Stepper()
    stepper.add(wrapped)
    stepper.backward(loss)                     # loss.backward() does as well, but for fp16
    stepper.step(opt, accumulate=4, clip=1.0)  # every fourth call updates

The gradient of an update is the mean over the samples of all ranks and micro-batches. Ranks of different batch sizes
say so: `weigh(loss, count, total)`, with the samples of this rank and of all ranks in this micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from phalanx.errors import UsageError

if TYPE_CHECKING:
    from phalanx.train.wrapped import Wrapped


class Update(NamedTuple):
    """What a call of step has done."""

    done: bool  # the parameters have changed
    skipped: bool = False  # a gradient of fp16 was infinite: no update, a smaller scale from now on
    norm: Any = None  # of the whole gradient before it was clipped: a tensor, so that nobody waits for it


WAITING, DONE = Update(False), Update(True)


@dataclass(slots=True)
class Window:
    """The micro-batches of one optimizer since its last update."""

    models: list[Wrapped]
    parameters: list[Any]
    groups: int
    batches: int = 0
    divisor: float = 0.0  # how many full micro-batches they are worth
    seen: int = 0  # the last of them


class Stepper:
    """All optimizers and wrapped models of a script."""

    def __init__(self) -> None:
        self.scaler: Any = None
        self.stepped = True  # since the last forward: the next one begins a micro-batch
        self._models: list[Wrapped] = []
        self._windows: dict[int, tuple[Any, Window]] = {}
        self._latest: tuple[Any, Window | None] = (None, None)
        self._accumulate = 1
        self._world = 1
        self._reference = 0.0  # samples of a window's first micro-batch, all ranks
        self._loaded: dict[str, Any] = {}  # state of a scaler that is not there yet
        self._scale = 0.0
        # Of the micro-batch at hand.
        self._number = 0
        self._share = 1.0
        self._ending = False
        self._scaled = False

    def add(self, wrapped: Wrapped, accumulate: int = 1) -> None:
        _positive(accumulate)
        self._models.append(wrapped)
        self._forget()
        self._accumulate = accumulate
        self._world = wrapped.world_size
        if self.scaler is None:
            self.scaler = wrapped.precision.scaler()
            self.load_state_dict({"scaler": self._loaded})
        wrapped.synchronise(accumulate == 1)

    def remove(self, wrapped: Wrapped) -> None:
        self._models = [model for model in self._models if model is not wrapped]
        self._forget()

    def begin(self) -> None:
        """The first forward after a step. Only now, for several optimizers may step after one backward."""
        self.stepped = False
        self._number += 1
        self._share = 1.0
        self._ending = self._scaled = False
        for model in self._models:
            if model.wanted is not model.synchronised:
                model.synchronise(model.wanted)

    def finish(self) -> None:
        """Before the forward of a window's last micro-batch, when it comes early: at the end of an epoch."""
        self.begin()
        self._ending = True
        for model in self._models:
            model.synchronise(True)

    def weigh(self, loss: Any, count: int, total: int) -> Any:
        """The mean loss of this rank's `count` samples, as its part of the mean over all ranks' `total`."""
        if not 0 <= count <= total or total < 1:
            raise UsageError(
                f"weigh(loss, {count}, {total}): a rank has from 0 to all of the samples of all ranks",
                fix="weigh(loss, len(x), the sum of len(x) over all ranks)",
            )
        # A window is measured in the total of its first batch, so that equal ones need no correction of gradients.
        self._reference = self._reference or float(total)
        self._share = total / self._reference
        if count == 0:
            return loss.nan_to_num() * 0.0  # the mean of nothing, but the rank takes part in the backward
        weight = count * self._world / self._reference
        return loss if weight == 1.0 else loss * weight

    def scale(self, loss: Any) -> Any:
        self._scaled = True
        return loss if self.scaler is None else self.scaler.scale(loss)

    def backward(self, loss: Any) -> None:
        self.scale(loss).backward()

    def step(
        self, opt: Any, *, accumulate: int | None = None, clip: float | None = None, scheduler: Any = None
    ) -> Update:
        latest, window = self._latest
        if latest is not opt or window is None or len(opt.param_groups) != window.groups:
            window = self._enter(opt)
        if accumulate is None:
            accumulate = self._accumulate
        elif accumulate != self._accumulate:
            _positive(accumulate)
            self._accumulate = accumulate
        if window.models:
            self._check(window)
        self.stepped = True
        window.seen = self._number
        window.batches += 1
        window.divisor += self._share
        update = WAITING
        # A window that was made shorter ends with the first backward that was synchronised.
        if (window.batches >= accumulate or self._ending) and _synchronised(window.models):
            update = self._update(opt, window, clip)
            window.batches, window.divisor = 0, 0.0
            if len(self._windows) == 1 or not any(other.batches for _, other in self._windows.values()):
                self._reference = 0.0
            if scheduler is not None and update.done:
                scheduler.step()
        want = window.batches + 1 >= accumulate
        for model in window.models:
            if model.wanted is not want:
                model.wanted = want
        return update

    def _update(self, opt: Any, window: Window, clip: float | None) -> Update:
        scaler = self.scaler
        if scaler is None and clip is None and window.divisor == 1.0:
            opt.step()
            opt.zero_grad(set_to_none=True)
            return DONE
        grads = [parameter.grad for parameter in window.parameters if parameter.grad is not None]
        if scaler is not None:
            scaler.unscale_(opt)
        norm = None
        if clip is not None:
            norm = clipped(grads, window.divisor, clip)
        elif window.divisor != 1.0 and grads:
            torch._foreach_div_(grads, window.divisor)
        done = True
        if scaler is None:
            opt.step()
        else:
            before = self._scale or scaler.get_scale()
            scaler.step(opt)
            scaler.update()
            self._scale = scaler.get_scale()
            done = self._scale >= before
        opt.zero_grad(set_to_none=True)
        return Update(done, not done, norm)

    def _check(self, window: Window) -> None:
        if window.seen == self._number:
            raise UsageError(
                "the wrapped model was not called since this optimizer's last step",
                details=["a call of the model itself averages no gradients between ranks"],
                fix="ddp = run.wrap(model), and then ddp(x) in place of model(x)",
            )
        if self.scaler is not None and not self._scaled:
            raise UsageError(
                "fp16: the loss of this step was not scaled, so that small gradients are lost",
                fix="run.backward(loss) in place of loss.backward()",
            )

    def _enter(self, opt: Any) -> Window:
        _, window = self._windows.get(id(opt), (None, None))
        if window is None or len(opt.param_groups) != window.groups:
            for model in self._models:
                model.adopt(opt)
            parameters = [parameter for group in opt.param_groups for parameter in group["params"]]
            models = [model for model in self._models if model.holds(parameters)]
            if self._models and not models:
                raise UsageError(
                    "the optimizer has no parameter of a wrapped model: its steps would change nothing",
                    fix="opt = torch.optim.AdamW(model.parameters()), with the model that was wrapped",
                )
            fresh = Window(models, parameters, len(opt.param_groups))
            if window is not None:
                fresh.batches, fresh.divisor, fresh.seen = window.batches, window.divisor, window.seen
            window = fresh
            self._windows[id(opt)] = opt, window
        self._latest = opt, window
        return window

    def _forget(self) -> None:
        self._windows.clear()
        self._latest = (None, None)

    def state_dict(self) -> dict[str, Any]:
        return {"scaler": self._loaded if self.scaler is None else self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Before models are wrapped, or after."""
        self._loaded = state.get("scaler") or {}
        if self.scaler is not None and self._loaded:
            self.scaler.load_state_dict(self._loaded)
            self._scale = 0.0


def clipped(grads: list[Any], divisor: float, most: float) -> Any:
    """Gradients by `divisor`, and no longer than `most`, in one pass. Returns their length before they were shrunk:
    over all parameters and, with FSDP, the shards of all ranks."""
    norm = torch.nn.utils.get_total_norm(grads)
    if hasattr(norm, "full_tensor"):
        norm = norm.full_tensor()
    if divisor != 1.0:
        norm = norm / divisor
    shrink = torch.clamp(most / (norm + 1e-6), max=1.0)
    if grads:
        torch._foreach_mul_(grads, shrink if divisor == 1.0 else shrink / divisor)
    return norm


def _synchronised(models: list[Wrapped]) -> bool:
    for model in models:  # noqa: SIM110 - a generator costs more than all the rest of a step
        if not model.synchronised:
            return False
    return True


def _positive(accumulate: int) -> None:
    if accumulate < 1:
        raise UsageError(f"accumulate={accumulate}: a step takes one micro-batch or more", fix="accumulate=1")
