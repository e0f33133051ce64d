"""The module that `run.wrap` returns: the user's own module, wrapped for training on many ranks."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from phalanx.errors import UsageError
from phalanx.train.model import buckets
from phalanx.train.model.precision import Precision, widened
from phalanx.train.model.replaced_parameters import ReplacedParameters

if TYPE_CHECKING:
    from phalanx.train.checkpoint.peers import Broadcaster
    from phalanx.train.stepping.stepper import OptimizerUpdate, Stepper


class Wrapped(nn.Module):  # type: ignore[misc]
    """The result of `run.wrap(model)`. Attributes, parameters and names of the state are those of the user's module."""

    module: Any
    how: str
    device: Any
    world_size: int
    precision: Precision
    stepper: Stepper
    accumulate: int
    synchronised: bool  # the current backward averages gradients
    wanted: bool  # the next backward averages gradients

    def __init__(
        self,
        module: Any,
        engine: Any,
        how: str,
        *,
        peers: Broadcaster,
        device: Any,
        world_size: int,
        precision: Precision,
        stepper: Stepper,
        accumulate: int,
        sharded: bool,
        became: Sequence[tuple[Any, Any]] = (),
    ) -> None:
        super().__init__()
        # Not through nn.Module, which would register them as submodules and prefix every name.
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
            _peers=peers,
            _replaced=ReplacedParameters(became),
            _sharded=sharded,
            _casts=precision.name is not None and not sharded,
            _moves=device.type != "cpu" and not sharded,
            training=module.training,
        )
        stepper.add(self, accumulate)

    # -- in the loop

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model: `ddp(x)`."""
        engine = self._engine
        learns = torch.is_grad_enabled()
        if learns:
            if self.stepper.stepped:
                self.stepper.begin()
                if self.stepper.hooks.first_forward is not None:
                    self.stepper.hooks.first_forward((args, kwargs))
                    self.stepper.hooks.first_forward = None
        elif self.how == "ddp":
            # Without gradients there is nothing to exchange: a rank can evaluate alone.
            engine = self.module
        if self._moves and engine is self.module:
            args, kwargs = _moved(args, self.device), _moved(kwargs, self.device)
        if self._sharded and not learns:
            output = engine(*args, **kwargs)
            # FSDP keeps the root unsharded for a backward that does not follow: parameters() would not return the
            # shards.
            engine.reshard()
            return output
        if not self._casts:
            return engine(*args, **kwargs)
        with self.precision.autocast():
            output = engine(*args, **kwargs)
        return widened(output)

    def share_buffers(self) -> None:
        """Give all ranks the buffers of rank 0, in place of DDP before its next forward."""
        if self.how == "ddp" and self._engine is not self.module and self._engine.will_sync_module_buffers():
            self._engine._sync_buffers()
            self._engine.require_forward_param_sync = False

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return a context with the precision of the forward, for computations outside of it."""
        return self.precision.autocast()

    def backward(self, loss: Any, **options: Any) -> None:
        """Call `loss.backward()`, scaled for fp16. `run.backward` also weights by samples."""
        self.stepper.backward(loss, **options)

    def weigh(self, loss: Any, count: int, total: int) -> Any:
        """Return the mean loss of `count` samples as this rank's part of the mean over all ranks' `total`."""
        return self.stepper.weights.weigh(loss, count, total)

    def finish(self) -> None:
        """Make the next micro-batch the last one of its window."""
        self.stepper.finish()

    def step(
        self, opt: Any, *, accumulate: int | None = None, clip: float | None = None, scheduler: Any = None
    ) -> OptimizerUpdate:
        """Update, if the window of micro-batches is full. `run.step` also commits."""
        return self.stepper.step(opt, accumulate=accumulate, clip=clip, scheduler=scheduler)

    @property
    def scaler(self) -> Any:
        """The gradient scaler of fp16; None without fp16."""
        return self.stepper.scaling.scaler

    # -- afterwards

    def export(self, path: str | os.PathLike[str]) -> None:
        """`ddp.export("model.safetensors")`: write the whole model to one file, .safetensors or .pt.

        All ranks must call it. Names are those of your own module.
        """
        from phalanx.train.checkpoint.export import export

        export(self.module, path, self.__dict__.get("_peers"))  # None after unpickling

    # -- for the stepper

    def synchronise(self, on: bool) -> None:
        """Set whether the next backward averages the gradients of all ranks."""
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
        """Return whether one of these is a parameter of the model."""
        own = {id(parameter) for parameter in self.module.parameters()}
        return any(id(parameter) in own for parameter in parameters)

    def adopt(self, opt: Any) -> None:
        """Give an optimizer that was created before the wrapping the current parameters."""
        self._replaced.adopt(opt)

    # -- the end

    @property
    def layout(self) -> list[list[int]]:
        """The layout of DDP's buckets."""
        return buckets.layout(self._engine) if self.how == "ddp" and self._engine is not self.module else []

    def close(self) -> None:
        """Release the process group. A DDP that is the last to hold it may wait forever in its destructor."""
        known = self.__dict__
        self.stepper.remove(self)
        engine, known["_engine"] = self._engine, self.module
        if engine is not self.module and self.how == "ddp":
            # A loss, a traceback or a cycle may still hold the DDP, but not these.
            engine.reducer = engine.logger = None

    # -- as the user's own

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("module")
            if module is None:
                raise
        return getattr(module, name)  # after the block: a report then shows its error alone

    def train(self, mode: bool = True) -> Wrapped:
        """Set training mode, as `nn.Module.train` does."""
        self._engine.train(mode)
        self.module.train(mode)
        self.__dict__["training"] = mode
        return self

    def apply(self, function: Any) -> Wrapped:
        """Apply a function to every submodule of the user's module."""
        self.module.apply(function)
        return self

    def _apply(self, function: Any, recurse: bool = True) -> Wrapped:
        self.module._apply(function, recurse)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the user's module, for example to average weights: a process group cannot be copied."""
        if self._sharded:
            raise UsageError(
                f"a model that {self.how} has sharded cannot be copied",
                fix='average = copy.deepcopy(model) before run.wrap, then run.wrap(average, "' + self.how + '")',
            )
        return copy.deepcopy(self.module, memo)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, for example by `torch.save(ddp)`: a process group cannot be pickled."""
        return {name: value for name, value in self.__dict__.items() if name != "_peers"}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the user's module."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the state of the user's module."""
        return self.module.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Yield the parameters of the user's module."""
        yield from self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Yield the buffers of the user's module."""
        yield from self.module.named_buffers(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, Any]]:
        """Yield the children of the user's module."""
        yield from self.module.named_children()

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Yield the submodules of the user's module."""
        yield from self.module.named_modules(*args, **kwargs)

    def extra_repr(self) -> str:
        """Return how the model is wrapped, for `repr`."""
        return f"{self.how}, {self.world_size} ranks, {self.device}\n{self.module!r}"


def _moved(value: Any, device: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), value)
