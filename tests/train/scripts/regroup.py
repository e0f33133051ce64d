"""regroup.py FOLDER: FSDP, whose group forms anew after some steps with nobody lost. Both orders of keep and wrap.

Each rank writes the parameters that it ends with, and those without a regroup.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import phalanx
from phalanx.contract.worker_messages import Assignment
from phalanx.train.elastic.handover import Handover
from phalanx.train.elastic.state_offer import StateOffer
from phalanx.train.run import Run


def join(generation: int, past: StateOffer | None) -> Run:
    environ = os.environ
    size = int(environ["WORLD_SIZE"])
    world = Assignment(
        generation=generation,
        rank=int(environ["RANK"]),
        world_size=size,
        local_rank=int(environ["LOCAL_RANK"]),
        local_world_size=size,
        node=0,
        nodes=1,
        topology=environ.get("PHALANX_TOPOLOGY", ""),
        address=environ["MASTER_ADDR"],
        port=int(environ["MASTER_PORT"]),
    )
    run = Run.join(world=world, word=past.word if past is not None else "")
    run.seed_everything()
    if past is not None:
        run.generation, run.past, run.handover = generation, past, Handover(run.membership, past)
        run.handover.prepare()
    return run


def trained(run: Run, until: int, first: str) -> dict[str, list[float]]:
    torch.manual_seed(run.generation)  # what a model is made with does not matter where it is handed over
    model = nn.Sequential(nn.Linear(6, 15), nn.Tanh(), nn.Linear(15, 1))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if first == "keep":
        run.keep(model=model, opt=opt)
    net = run.wrap(model, "fsdp")
    if first == "wrap":
        run.keep(model=model, opt=opt)
    chance = torch.Generator()
    while run.steps < until:
        chance.manual_seed(run.steps * 100 + run.rank)
        run.backward(net(torch.randn(4, 6, generator=chance)).square().mean())
        run.step(opt)
    if until == 3:  # and in the middle of a step, when the whole model is there
        run.backward(net(torch.randn(4, 6)).sum())
    full: dict[str, Any] = {name: one.full_tensor() for name, one in model.named_parameters()} if until == 6 else {}
    return {name: value.flatten().tolist() for name, value in full.items()}


def main() -> None:
    found = []
    for number, first in enumerate(("keep", "wrap")):
        run = join(10 * number, None)
        trained(run, 3, first)
        past = run.standing()
        run.abandon()
        run = join(10 * number + 1, past)
        ours = trained(run, 6, first)
        taken = run.taken_over
        run.abandon()
        run = join(10 * number + 2, None)
        run.generation = 0
        theirs = trained(run, 6, first)
        run.abandon()
        found.append([taken, ours, theirs])
    rank = os.environ["RANK"]
    (Path(sys.argv[1]) / f"end.{rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    assert phalanx
    main()
