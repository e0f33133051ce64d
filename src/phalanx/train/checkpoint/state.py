"""Converts the kept objects to tensors and plain values, and back.

Names are those of the unwrapped model: the same with DDP, with FSDP and without, compiled or not. The state of an
optimizer uses the names of its parameters, so that it matches any order and sharding.

torch's `get_optimizer_state_dict` is similar, but makes a step of the optimizer to initialize its state, which counts
afterwards, and supports one model per optimizer.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from phalanx.errors import CheckpointError
from phalanx.train.checkpoint.format.plain import Tensors, packed, tensor_names, unpacked

_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_EXTRA_STATE = "_extra_state"  # torch's name for the result of get_extra_state


@dataclass
class State:
    """Tensors by name, and other values as JSON by the name of the object. Rank 0 writes the tensors in `own`."""

    tensors: Tensors = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)
    sharded: list[str] = field(default_factory=list)  # names of the objects of which this rank has shards


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model without DDP, DataParallel and torch.compile."""
    while True:
        inner = model.module if isinstance(model, (DistributedDataParallel, DataParallel)) else None
        inner = inner if inner is not None else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def plain_name(name: str) -> str:
    """Return the name of a parameter in the unwrapped model."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def taken(kept: Mapping[str, object]) -> State:
    """Return the state of the kept objects. Tensors are not copied."""
    state = State()
    for name, thing in kept.items():
        count = len(state.tensors)
        if isinstance(thing, nn.Module):
            inner = unwrapped(thing)
            # Shards are only used through `to_local`, and detaching them takes longer than everything else.
            own = inner.state_dict(keep_vars=True).items()
            values = {plain_name(key): value if isinstance(value, DTensor) else _detached(value) for key, value in own}
            before = set(state.tensors)
            state.plain[name] = packed(values, name, state.tensors)
            # Buffers, such as running means, differ between ranks: those of rank 0 are used.
            learnt = {f"{name}.{plain_name(key)}" for key, _ in inner.named_parameters(remove_duplicate=False)}
            state.own |= set(state.tensors) - before - learnt
        elif isinstance(thing, torch.optim.Optimizer):
            state.plain[name] = packed(_optimizer_state(name, thing, kept), name, state.tensors)
        else:
            before = set(state.tensors)
            state.plain[name] = packed(_stateful(name, thing).state_dict(), name, state.tensors)
            state.own |= set(state.tensors) - before
        if any(isinstance(tensor, DTensor) for tensor in itertools.islice(state.tensors.values(), count, None)):
            state.sharded.append(name)
    return state


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


# -- restoring


@dataclass(frozen=True)
class Shape:
    """Type and shape of a tensor in a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def empty(self) -> torch.Tensor:
        """Return memory for the tensor."""
        return torch.empty(self.shape, dtype=self.dtype)


def targets(
    kept: Mapping[str, object],
    plain: Mapping[str, Any],
    saved: Mapping[str, Shape],
    *,
    only: Container[str] | None = None,
) -> Tensors:
    """Return memory for every tensor: a model's own, new memory for the rest. Raises if something does not match."""
    found: Tensors = {}
    for name, thing in kept.items():
        if only is not None and name not in only:
            continue
        if name not in plain:
            raise CheckpointError(
                f'the checkpoint has no "{name}"',
                details=[f"it has: {', '.join(plain)}"],
                fix="use the name with which it was saved, or load without it",
            )
        if isinstance(thing, nn.Module):
            found.update(_model_targets(name, thing, plain[name], saved))
        elif isinstance(thing, torch.optim.Optimizer):
            found.update(_optimizer_targets(name, thing, kept, saved))
        else:
            found.update(_stateful_targets(name, thing, kept, saved))
    return found


def restore(
    kept: Mapping[str, object], plain: Mapping[str, Any], tensors: Tensors, *, only: Container[str] | None = None
) -> None:
    """Load the state into the objects: models first, then optimizers, which schedulers read."""

    def turn(item: tuple[str, object]) -> int:
        return 0 if isinstance(item[1], nn.Module) else 1 if isinstance(item[1], torch.optim.Optimizer) else 2

    for name, thing in sorted(kept.items(), key=turn):
        if only is not None and name not in only:
            continue
        value = unpacked(plain[name], tensors)
        if isinstance(thing, nn.Module):
            inner = unwrapped(thing)
            own = inner.state_dict(keep_vars=True)
            inner.load_state_dict({key: _in_place(own[key], value[plain_name(key)]) for key in own})
        elif isinstance(thing, torch.optim.Optimizer):
            thing.load_state_dict(_by_place(name, thing, kept, value))
        else:
            _stateful(name, thing).load_state_dict(value)


def _in_place(own: Any, value: Any) -> Any:
    """Return the model's own tensor if the value was read into its memory: then torch copies nothing."""
    if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor) and not isinstance(own, DTensor):
        same = own.data_ptr() == value.data_ptr() and own.shape == value.shape and own.stride() == value.stride()
        return own if same and own.dtype == value.dtype else value
    return value


def _model_targets(name: str, model: nn.Module, plain: Mapping[str, Any], saved: Mapping[str, Shape]) -> Tensors:
    for buffer in model.buffers():
        if _is_expanded(buffer):
            buffer.data = buffer.contiguous()  # torch writes to no other
    have = {plain_name(key): value for key, value in unwrapped(model).state_dict().items()}
    details = [f"the model has {name}.{key}, the checkpoint does not" for key in have if key not in plain]
    details += [f"the checkpoint has {name}.{key}, the model does not" for key in sorted(set(plain) - set(have))]
    found: Tensors = {}
    for key in (key for key in have if key in plain):
        value, full = have[key], f"{name}.{key}"
        if not isinstance(value, torch.Tensor) or key.endswith(_EXTRA_STATE):
            # Extra state of the module, of any shape.
            found.update({one: saved[one].empty() for one in tensor_names(plain[key])})
        elif full not in saved:
            details.append(f"{full} is a tensor in the model, and none in the checkpoint")
        elif tuple(value.shape) != saved[full].shape:
            details.append(f"{full} is {tuple(value.shape)} in the model, {saved[full].shape} in the checkpoint")
        else:
            found[full] = value
    if details:
        raise CheckpointError(
            f'the checkpoint does not fit the model kept as "{name}"',
            details=details[:6] + [f"and {len(details) - 6} more"] * (len(details) > 6),
            fix="build the model as it was when the checkpoint was written, or start in an empty folder",
        )
    return found


def _is_expanded(buffer: torch.Tensor) -> bool:
    """Return whether elements share memory, as those of `torch.ones(1).expand(3)` do."""
    if is_lazy(buffer) or buffer.layout is not torch.strided or buffer.is_nested:
        return False
    return any(size > 1 and not step for size, step in zip(buffer.shape, buffer.stride(), strict=True))


def _stateful_targets(name: str, thing: object, kept: Mapping[str, object], saved: Mapping[str, Shape]) -> Tensors:
    shapes = {key: shape for key, shape in saved.items() if key == name or key.startswith(f"{name}.")}
    models = [one for one in kept.values() if isinstance(one, nn.Module)]
    own: Tensors = {}
    if shapes and any(isinstance(parameter, DTensor) for model in models for parameter in model.parameters()):
        packed(_stateful(name, thing).state_dict(), name, own)
    return {key: _alike(own.get(key), shape) for key, shape in shapes.items()}


def _alike(own: torch.Tensor | None, shape: Shape) -> torch.Tensor:
    """Return memory for a tensor, sharded if the object's own is, such as an average of sharded parameters."""
    if isinstance(own, DTensor) and tuple(own.shape) == shape.shape:
        return torch.zeros_like(own.detach(), dtype=shape.dtype)
    return shape.empty()


def _optimizer_targets(
    name: str, optimizer: torch.optim.Optimizer, kept: Mapping[str, object], saved: Mapping[str, Shape]
) -> Tensors:
    parameters = {f"{name}.state.{given}.": parameter for parameter, given in _names(name, optimizer, kept).items()}
    found: Tensors = {}
    for key, shape in saved.items():
        if not key.startswith(f"{name}."):
            continue
        parameter = next((parameters[part] for part in _beginnings(key) if part in parameters), None)
        found[key] = _alike(parameter, shape)
    return found


def _beginnings(key: str) -> Iterator[str]:
    """Yield the key up to each dot, longest first: names contain dots, and their state may be a list of tensors."""
    end = key.rfind(".")
    while end > 0:
        yield key[: end + 1]
        end = key.rfind(".", 0, end)


def _optimizer_state(name: str, optimizer: torch.optim.Optimizer, kept: Mapping[str, object]) -> dict[str, Any]:
    names = _names(name, optimizer, kept)
    flat = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    state = optimizer.state_dict()
    groups = [{**group, "params": [flat[place] for place in group["params"]]} for group in state["param_groups"]]
    return {**state, "state": {flat[place]: value for place, value in state["state"].items()}, "param_groups": groups}


def _by_place(
    name: str, optimizer: torch.optim.Optimizer, kept: Mapping[str, object], value: dict[str, Any]
) -> dict[str, Any]:
    """Return the state with indices of parameters, according to the optimizer's current groups."""
    names = _names(name, optimizer, kept)
    saved = [set(group["params"]) for group in value["param_groups"]]
    now = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    if saved != [set(group) for group in now]:
        both = [set().union(*saved), set().union(*map(set, now))]
        details = [f"saved: {len(saved)} groups of {[len(group) for group in saved]} parameters"]
        details += [f"now: {len(now)} groups of {[len(group) for group in now]} parameters"]
        details += [f"not the same: {', '.join(sorted(both[0] ^ both[1])[:5])}"] * (both[0] != both[1])
        raise CheckpointError(f'the checkpoint does not fit the optimizer kept as "{name}"', details=details)
    places = {given: place for place, given in enumerate(given for group in now for given in group)}
    groups = [
        {**group, "params": [places[given] for given in mine]}
        for group, mine in zip(value["param_groups"], now, strict=True)
    ]
    return {
        **value,
        "state": {places[given]: item for given, item in value["state"].items()},
        "param_groups": groups,
    }


def _names(name: str, optimizer: torch.optim.Optimizer, kept: Mapping[str, object]) -> dict[torch.nn.Parameter, str]:
    """Return the names of the optimizer's parameters, prefixed with the name of their kept model."""
    known: dict[torch.nn.Parameter, str] = {}
    for given, thing in kept.items():
        if isinstance(thing, nn.Module):
            for key, parameter in unwrapped(thing).named_parameters():
                known.setdefault(parameter, f"{given}.{plain_name(key)}")
    mine = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    unknown = [parameter for parameter in mine if parameter not in known]
    if unknown:
        raise CheckpointError(
            f'"{name}" optimizes {len(unknown)} of its {len(mine)} parameters for a model that is not kept',
            details=[f"the first has the shape {tuple(unknown[0].shape)}"],
            fix=f"keep the model as well: keep(model=model, {name}={name}); and make the optimizer after FSDP",
        )
    return {parameter: known[parameter] for parameter in mine}


def _stateful(name: str, thing: object) -> Any:
    if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
        raise CheckpointError(
            f'"{name}" is a {type(thing).__name__}, which has no state_dict() and load_state_dict()',
            fix="give it both, or leave it out",
        )
    return thing
