"""FSDP: which parts of a model are gathered together, and the sharding itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from phalanx.errors import OptionError
from phalanx.train.model.replicas import Rows

# A class of module, several, or a function that is called for every module.
Policy = type | tuple[type, ...] | Callable[[Any], bool] | None


def units(model: Any, policy: Policy) -> list[Any]:
    """Return the parts that are gathered together, inner ones first.

    A part that shares a parameter with another one is left to the root: sharding it would untie the parameter.
    """
    if policy is None:
        found = _blocks(model)
    elif isinstance(policy, type | tuple):
        found = [module for module in model.modules() if isinstance(module, policy)]
    elif callable(policy):
        found = [module for module in model.modules() if policy(module)]
    else:
        raise OptionError(f"shard={policy!r}: expected a class of module, or a function of one", fix="shard=Block")
    found = [module for module in found if module is not model]
    if policy is not None and not found:
        raise OptionError(
            f"shard={policy!r} names no part of {type(model).__name__}",
            fix="shard=Block, with the class of the model's repeated block",
        )
    whole = any(True for _ in model.parameters())
    return [module for module in reversed(found) if whole and _apart(model, module)]


def _blocks(model: Any) -> list[Any]:
    """Return the children that have parameters; those of a list, which has no forward, one by one."""
    found: list[Any] = []
    for child in model.children():
        if type(child).forward is torch.nn.Module.forward:
            found.extend(_blocks(child))
        elif any(True for _ in child.parameters()):
            found.append(child)
    return found


def _apart(model: Any, unit: Any) -> bool:
    inside = {id(module) for module in unit.modules()}
    own = {id(parameter) for parameter in unit.parameters()}
    outside = (module for module in model.modules() if id(module) not in inside)
    return bool(own) and all(
        id(parameter) not in own for module in outside for parameter in module._parameters.values()
    )


def check(model: Any, parts: Sequence[Any]) -> None:
    """Raise for parameters that FSDP cannot shard. `parts`: those that are gathered together, inner ones first."""
    for name, parameter in model.named_parameters():
        if not parameter.dim():
            raise OptionError(
                f"{name} has no dimension along which it could be sharded",
                details=["found a parameter of the shape (), expected one dimension or more"],
                fix=f"torch.nn.Parameter(torch.ones(1)) for {name}, or run.wrap(model), which is DDP",
            )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    seen: set[int] = set()
    for part in (*parts, model):
        types: dict[torch.dtype, str] = {}
        for parameter in part.parameters():
            if id(parameter) not in seen and parameter.requires_grad:
                types.setdefault(parameter.dtype, names[id(parameter)])
            seen.add(id(parameter))
        if len(types) > 1:
            raise _mixed(model, part, types)


def _mixed(model: Any, part: Any, types: dict[torch.dtype, str]) -> OptionError:
    where = "the model" if part is model else next(name for name, one in model.named_modules() if one is part)
    first, second = (f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in list(types.items())[:2])
    return OptionError(
        f"FSDP gathers {where} as one, and its parameters have different types",
        details=[f"{first}, {second}", "expected one type for each part; shard= names smaller parts"],
        fix='run.wrap(model.float(), "fsdp", precision="bf16"), or shard=torch.nn.Linear',
    )


def _start_from_rank_0(model: Any, *, equal: bool) -> None:
    """Like DDP, start from the model of rank 0: with different seeds the shards would not match.

    `equal`: the state of the model is the same on all ranks. Buffers may differ.
    """
    same = set(model.state_dict()) if equal else set[str]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_contiguous():  # FSDP shards no others, such as those of channels_last
                parameter.data = parameter.data.contiguous()
            if name not in same:
                dist.broadcast(parameter, 0)
        for buffer in model.buffers():
            whole = buffer.contiguous()  # an expanded one cannot be written to
            dist.broadcast(whole, 0)
            if whole is not buffer and not torch.equal(whole, buffer):
                buffer.data = whole


def shard(
    model: Any,
    device: Any,
    *,
    policy: Policy,
    precision: Any,
    compiled: bool,
    rows: Rows | None = None,
    equal: bool = False,
) -> list[tuple[Any, Any]]:
    """Shard the model in place; return each parameter before and after, for optimizers that were created before.

    `rows`: the ranks of each replica; None: all ranks share one. `equal`: its state is the same on all ranks.
    """
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import fully_shard

    parts = units(model, policy)
    check(model, parts)
    _start_from_rank_0(model, equal=equal)
    if rows is None:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    else:
        mesh = DeviceMesh(device.type, rows, mesh_dim_names=("replicate", "shard"))
    before = dict(model.named_parameters(remove_duplicate=False))
    for part in parts:
        if compiled:
            part.compile()
        fully_shard(part, mesh=mesh, mp_policy=precision.policy())
    fully_shard(model, mesh=mesh, mp_policy=precision.policy(root=True))
    after = dict(model.named_parameters(remove_duplicate=False))
    return [(parameter, after[name]) for name, parameter in before.items()]
