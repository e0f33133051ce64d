"""What a script keeps, taken apart into tensors and plain values, and put together again.

Names are those of the unwrapped model: the same under DDP, FSDP and none, compiled or not. An optimizer's state goes by
the names of its parameters, so that it fits whatever order or sharding they have next time.

torch's own `get_optimizer_state_dict` does the like, but takes a step of the optimizer to find out what its state will
be, which counts as one afterwards, and knows one model an optimizer.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from phalanx.errors import CheckpointError
from phalanx.train.checkpoint.plain import Tensors, packed, tensor_names, unpacked

_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_EXTRA_STATE = "_extra_state"  # torch's name for what get_extra_state returns


@dataclass
class State:
    """Tensors by name, all else as JSON by the name it is kept under; `own` are tensors that rank 0 has to write."""

    tensors: Tensors = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)


def unwrapped(model: nn.Module) -> nn.Module:
    """Without DDP, DataParallel and torch.compile around it."""
    while True:
        inner = model.module if isinstance(model, (DistributedDataParallel, DataParallel)) else None
        inner = inner if inner is not None else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def plain_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def taken(kept: Mapping[str, object]) -> State:
    state = State()
    for name, thing in kept.items():
        if isinstance(thing, nn.Module):
            inner = unwrapped(thing)
            # A shard is looked at through `to_local` alone, and to detach it takes longer than all the rest.
            own = inner.state_dict(keep_vars=True).items()
            values = {plain_name(key): value if isinstance(value, DTensor) else _detached(value) for key, value in own}
            before = set(state.tensors)
            state.plain[name] = packed(values, name, state.tensors)
            # Buffers, as the running means of batches, are not the same on all ranks: rank 0's are the ones that count.
            learnt = {f"{name}.{plain_name(key)}" for key, _ in inner.named_parameters(remove_duplicate=False)}
            state.own |= set(state.tensors) - before - learnt
        elif isinstance(thing, torch.optim.Optimizer):
            state.plain[name] = packed(_optimizer_state(name, thing, kept), name, state.tensors)
        else:
            before = set(state.tensors)
            state.plain[name] = packed(_stateful(name, thing).state_dict(), name, state.tensors)
            state.own |= set(state.tensors) - before
    return state


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


# -- and back


@dataclass(frozen=True)
class Shape:
    """Of a tensor in a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def empty(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype)


def targets(
    kept: Mapping[str, object],
    plain: Mapping[str, Any],
    saved: Mapping[str, Shape],
    *,
    only: Container[str] | None = None,
) -> Tensors:
    """Memory for every tensor that is needed: a model's own, new memory for the rest. Refuses what does not fit."""
    found: Tensors = {}
    for name, thing in kept.items():
        if only is not None and name not in only:
            continue
        if name not in plain:
            raise CheckpointError(
                f'the checkpoint has no "{name}"',
                details=[f"it has: {', '.join(plain)}"],
                fix="keep it under the name it was saved by, or load without it",
            )
        if isinstance(thing, nn.Module):
            found.update(_model_targets(name, thing, plain[name], saved))
        elif isinstance(thing, torch.optim.Optimizer):
            found.update(_optimizer_targets(name, thing, kept, saved))
        else:
            prefix = f"{name}."
            for key, shape in saved.items():
                if key == name or key.startswith(prefix):
                    found[key] = shape.empty()
    return found


def restore(
    kept: Mapping[str, object], plain: Mapping[str, Any], tensors: Tensors, *, only: Container[str] | None = None
) -> None:
    """Hand everything that has been read to those it belongs to: models first, for schedulers look at optimizers."""

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
    """The model's own tensor where it has been read into its memory: torch sees that there is nothing to copy."""
    if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor) and not isinstance(own, DTensor):
        same = own.data_ptr() == value.data_ptr() and own.shape == value.shape and own.stride() == value.stride()
        return own if same and own.dtype == value.dtype else value
    return value


def _model_targets(name: str, model: nn.Module, plain: Mapping[str, Any], saved: Mapping[str, Shape]) -> Tensors:
    have = {plain_name(key): value for key, value in unwrapped(model).state_dict().items()}
    details = [f"the model has {name}.{key}, the checkpoint has not" for key in have if key not in plain]
    details += [f"the checkpoint has {name}.{key}, the model has not" for key in sorted(set(plain) - set(have))]
    found: Tensors = {}
    for key in (key for key in have if key in plain):
        value, full = have[key], f"{name}.{key}"
        if not isinstance(value, torch.Tensor) or key.endswith(_EXTRA_STATE):
            # Whatever the module wants to be told, of whatever shape.
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


def _optimizer_targets(
    name: str, optimizer: torch.optim.Optimizer, kept: Mapping[str, object], saved: Mapping[str, Shape]
) -> Tensors:
    parameters = {f"{name}.state.{given}.": parameter for parameter, given in _names(name, optimizer, kept).items()}
    found: Tensors = {}
    for key, shape in saved.items():
        if not key.startswith(f"{name}."):
            continue
        parameter = next((parameters[part] for part in _beginnings(key) if part in parameters), None)
        if isinstance(parameter, DTensor) and tuple(parameter.shape) == shape.shape:
            found[key] = torch.zeros_like(parameter.detach(), dtype=shape.dtype)
        else:
            found[key] = shape.empty()
    return found


def _beginnings(key: str) -> Iterator[str]:
    """Up to each dot, the longest first: names of parameters have dots, and their state may be a list of tensors."""
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
    """The state as the optimizer wants it: parameters by place, as they are in its groups now."""
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
    """The name of each of its parameters, with that of the kept model it is in."""
    known: dict[torch.nn.Parameter, str] = {}
    for given, thing in kept.items():
        if isinstance(thing, nn.Module):
            for key, parameter in unwrapped(thing).named_parameters():
                known.setdefault(parameter, f"{given}.{plain_name(key)}")
    mine = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = [parameter for parameter in mine if parameter not in known]
    if strangers:
        raise CheckpointError(
            f'"{name}" optimizes {len(strangers)} of its {len(mine)} parameters for a model that is not kept',
            details=[f"the first has the shape {tuple(strangers[0].shape)}"],
            fix=f"keep the model as well: keep(model=model, {name}={name}); and make the optimizer after FSDP",
        )
    return {parameter: known[parameter] for parameter in mine}


def _stateful(name: str, thing: object) -> Any:
    if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
        raise CheckpointError(
            f'"{name}" is a {type(thing).__name__}, which has no state_dict() and load_state_dict()',
            fix="give it both, or keep its values in `extra`",
        )
    return thing
