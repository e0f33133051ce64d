"""Loss curves of one training in many ways, each over the same global batches. Rank 0 writes them as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from party import Party, mlp, share

from phalanx.train.model.wrap import wrap

STEPS = 6
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"accumulate": 2},
    "clip": {"clip": 0.05},
    "both": {"accumulate": 2, "clip": 0.05},
    "adamw": {"accumulate": 2, "clip": 0.05, "adamw": True},
    "uneven": {"uneven": True},
    "uneven windows": {"uneven": True, "accumulate": 2, "clip": 0.05, "sizes": (9, 3)},
}


def batches(case: dict[str, Any]) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return steps of micro-batches; always 12 samples per step."""
    torch.manual_seed(2)
    x = torch.randn(STEPS * 12, 6)
    y = torch.stack([x.sum(1), x.prod(1)], 1)
    sizes = case.get("sizes") or [12 // case.get("accumulate", 1)] * case.get("accumulate", 1)
    steps = zip(x.split(12), y.split(12), strict=True)
    return [list(zip(a.split(list(sizes)), b.split(list(sizes)), strict=True)) for a, b in steps]


def optimizer(model: torch.nn.Module, case: dict[str, Any]) -> torch.optim.Optimizer:
    if case.get("adamw"):
        return torch.optim.AdamW(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def reference(case: dict[str, Any]) -> dict[str, list[float]]:
    """Plain PyTorch: one process, the whole batch at once."""
    model = mlp()
    opt = optimizer(model, case)
    losses, norms = [], []
    for step in batches(case):
        x, y = (torch.cat(parts) for parts in zip(*step, strict=True))
        loss = torch.nn.functional.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        if "clip" in case:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), case["clip"]).item())
        opt.step()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "end": [parameter.abs().sum().item() for parameter in model.parameters()]}


def trained(party: Party, how: str, case: dict[str, Any]) -> dict[str, list[float]]:
    model = mlp()
    opt = optimizer(model, case)
    wrapped = wrap(model, how, group=party, accumulate=case.get("accumulate", 1))
    uneven = case.get("uneven", False)
    losses, norms = [], []
    for step in batches(case):
        total = torch.zeros(())
        for number, (x, y) in enumerate(step):
            part = share(len(x), party.world_size, party.rank, uneven=uneven)
            loss = torch.nn.functional.mse_loss(wrapped(x[part]), y[part])
            count = len(x[part])
            total += loss.detach() * count / 12 if count else 0.0
            if uneven:
                loss = wrapped.weigh(loss, count, len(x))
            loss.backward()
            update = wrapped.step(opt, accumulate=case.get("accumulate", 1), clip=case.get("clip"))
            assert update.done == (number + 1 == len(step)), (number, update)
        if party.world_size > 1:
            dist.all_reduce(total)
        losses.append(total.item())
        if update.norm is not None:
            norms.append(update.norm.item())
    end = [getattr(value, "full_tensor", lambda v=value: v)().abs().sum().item() for value in model.parameters()]
    return {"losses": losses, "norms": norms, "end": end}


def main() -> None:
    party = Party()
    found = {"reference": {name: reference(case) for name, case in CASES.items()}}
    others = [*(["dp"] if party.world_size == 1 else []), *(["hsdp"] if party.world_size != 3 else [])]
    for how in ("ddp", "fsdp", *others):
        found[how] = {name: trained(party, how, case) for name, case in CASES.items()}
    if party.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    party.close()


main()
