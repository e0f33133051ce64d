"""The module that a script calls: the user's own, with what it takes to train it on many ranks around it."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from phalanx.train.model import buckets
from phalanx.train.model.precision import Precision, widened

if TYPE_CHECKING:
    from phalanx.train.stepping import OptimizerUpdate, Stepper


class Wrapped(nn.Module):  # type: ignore[misc]
    """`run.wrap(model)`. Attributes, parameters and the names of its state are those of the user's module."""

    module: Any
    how: str
    device: Any
    world_size: int
    precision: Precision
    stepper: Stepper
    accumulate: int
    synchronised: bool  # the backward at hand
    wanted: bool  # the next one

    def __init__(
        self,
        module: Any,
        engine: Any,
        how: str,
        *,
        device: Any,
        world_size: int,
        precision: Precision,
        stepper: Stepper,
        accumulate: int,
        sharded: bool,
        became: Sequence[tuple[Any, Any]] = (),
    ) -> None:
        super().__init__()
        # Past nn.Module, which would make them parts of this one and prefix every name.
        self.__dict__.update(
            module=module,
            how=how,
            device=device,
            world_size=world_size,
            precision=precision,
            stepper=stepper,
            accumulate=accumulate,
            synchronised=True,
            wanted=True,
            _engine=engine,
            # Weak: what was there before is whole, and to hold it would be to save no memory by sharding.
            _became={id(before): (weakref.ref(before), after) for before, after in became},
            _sharded=sharded,
            _casts=precision.name is not None and not sharded,
            _moves=device.type != "cpu" and not sharded,
            training=module.training,
        )
        stepper.add(self, accumulate)

    # -- in the loop

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        engine = self._engine
        learns = torch.is_grad_enabled()
        if learns:
            if self.stepper.stepped:
                self.stepper.begin()
        elif self.how == "ddp":
            # No gradient, so nothing to agree on: a rank may evaluate alone, and no other waits for it.
            engine = self.module
        if self._moves and engine is self.module:
            args, kwargs = _moved(args, self.device), _moved(kwargs, self.device)
        if self._sharded and not learns:
            output = engine(*args, **kwargs)
            # FSDP keeps the root whole for a backward, which does not come: parameters() would not be the shards.
            engine.reshard()
            return output
        if not self._casts:
            return engine(*args, **kwargs)
        with self.precision.autocast():
            output = engine(*args, **kwargs)
        return widened(output)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """The precision of the forward, for what is computed beside it."""
        return self.precision.autocast()

    def backward(self, loss: Any, **options: Any) -> None:
        self.stepper.backward(loss, **options)

    def weigh(self, loss: Any, count: int, total: int) -> Any:
        return self.stepper.weigh(loss, count, total)

    def finish(self) -> None:
        self.stepper.finish()

    def step(
        self, opt: Any, *, accumulate: int | None = None, clip: float | None = None, scheduler: Any = None
    ) -> OptimizerUpdate:
        return self.stepper.step(opt, accumulate=accumulate, clip=clip, scheduler=scheduler)

    @property
    def scaler(self) -> Any:
        return self.stepper.scaler

    # -- for the stepper

    def synchronise(self, on: bool) -> None:
        """Whether the next backward averages the gradients of all ranks."""
        known = self.__dict__
        known["wanted"] = on
        if on is known["synchronised"]:
            return
        known["synchronised"] = on
        if self._sharded:
            self._engine.set_requires_gradient_sync(on)
        elif self.how == "ddp" and self._engine is not self.module:
            self._engine.require_backward_grad_sync = on

    def holds(self, parameters: list[Any]) -> bool:
        own = {id(parameter) for parameter in self.module.parameters()}
        return any(id(parameter) in own for parameter in parameters)

    def adopt(self, opt: Any) -> None:
        """Make an optimizer that was built before the wrapping hold what its parameters have become since."""
        for group in opt.param_groups:
            group["params"] = [self._now(parameter) for parameter in group["params"]]
        for parameter in list(opt.state):
            now = self._now(parameter)
            opt.state[now] = {name: _alike(value, parameter, now) for name, value in opt.state.pop(parameter).items()}

    def _now(self, parameter: Any) -> Any:
        known, after = self._became.get(id(parameter), (None, None))
        # An id may be that of another by now.
        return after if known is not None and known() is parameter else parameter

    # -- the end

    @property
    def layout(self) -> list[list[int]]:
        """Of DDP's buckets."""
        return buckets.layout(self._engine) if self.how == "ddp" and self._engine is not self.module else []

    def close(self) -> None:
        """Let go of the group. A DDP that is the last to hold it may wait for ever when it is destroyed."""
        known = self.__dict__
        self.stepper.remove(self)
        engine, known["_engine"] = self._engine, self.module
        if engine is not self.module and self.how == "ddp":
            # What else holds the wrapper (a loss, a traceback, a cycle) does not hold these.
            engine.reducer = engine.logger = None

    # -- as the user's own

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("module")
            if module is None:
                raise
            return getattr(module, name)

    def train(self, mode: bool = True) -> Wrapped:
        self._engine.train(mode)
        self.module.train(mode)
        self.__dict__["training"] = mode
        return self

    def apply(self, function: Any) -> Wrapped:
        self.module.apply(function)
        return self

    def _apply(self, function: Any, recurse: bool = True) -> Wrapped:
        self.module._apply(function, recurse)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Of the user's module, as a moving average of the weights wants it: a group cannot be copied."""
        return copy.deepcopy(self.module, memo)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        yield from self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        yield from self.module.named_buffers(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, Any]]:
        yield from self.module.named_children()

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        yield from self.module.named_modules(*args, **kwargs)

    def extra_repr(self) -> str:
        return f"{self.how}, {self.world_size} ranks, {self.device}\n{self.module!r}"


def _moved(value: Any, device: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), value)


def _alike(value: Any, before: Any, now: Any) -> Any:
    """State of an optimizer, laid out as its parameter is now. A counter stays where it is."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    value = value.to(now.device)
    if now is before or value.shape != before.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, now.device_mesh, now.placements)
