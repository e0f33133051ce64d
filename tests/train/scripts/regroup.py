"""regroup.py FOLDER: FSDP whose group forms again after some steps without a loss. Both orders of keep and wrap.

Each rank writes its final parameters, and those without a regroup.
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
from phalanx.contract.messages.worker_messages import Assignment
from phalanx.contract.ranks.placement import RankPlacement
from phalanx.train.elastic.handover import Handover
from phalanx.train.elastic.recovery_state import Generation, RecoveryState
from phalanx.train.elastic.state_offer import StateOffer
from phalanx.train.run import Run
from phalanx.worker.process_group.group import WorkerProcessGroup
from phalanx.worker.rendezvous.membership import form


def join(generation: int, offer: StateOffer | None, *, number: int = 0) -> Run:
    environ = os.environ
    size = int(environ["WORLD_SIZE"])
    assignment = Assignment(
        generation=generation,
        placement=RankPlacement(
            rank=int(environ["RANK"]),
            world_size=size,
            local_rank=int(environ["LOCAL_RANK"]),
            local_world_size=size,
            node_rank=0,
            node_count=1,
        ),
        topology=environ.get("PHALANX_TOPOLOGY", ""),
        address=environ["MASTER_ADDR"],
        port=int(environ["MASTER_PORT"]),
    )
    membership = form(assignment=assignment, offer=offer.encoded if offer is not None else "")
    handover = None
    if offer is not None:
        handover = Handover(membership, offer)
        handover.prepare()
    described = Generation(number=number, training=0, handover=handover)
    run = Run(WorkerProcessGroup(membership), recovery=RecoveryState(described, offer))
    run.group.seed_everything()
    return run


def trained(run: Run, until: int, first: str) -> dict[str, list[float]]:
    # The initial model does not matter if the state is handed over.
    torch.manual_seed(run._recovery.generation.number)
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
    if until == 3:  # and in the middle of a step, when the whole model is unsharded
        run.backward(net(torch.randn(4, 6)).sum())
    full: dict[str, Any] = {name: one.full_tensor() for name, one in model.named_parameters()} if until == 6 else {}
    return {name: value.flatten().tolist() for name, value in full.items()}


def main() -> None:
    found = []
    for number, first in enumerate(("keep", "wrap")):
        run = join(10 * number, None)
        trained(run, 3, first)
        offer = run._recovery.current_offer()
        run._abandon()
        run = join(10 * number + 1, offer, number=10 * number + 1)
        ours = trained(run, 6, first)
        taken = run._recovery.from_peers
        run._abandon()
        run = join(10 * number + 2, None)
        theirs = trained(run, 6, first)
        run._abandon()
        found.append([taken, ours, theirs])
    rank = os.environ["RANK"]
    (Path(sys.argv[1]) / f"end.{rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    assert phalanx
    main()
