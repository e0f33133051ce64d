"""Messages about nodes that the pages quote are those that phalanx prints."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.control.leader.rendezvous import RendezvousStatus
from phalanx.control.refusals import FIXES, Rejection
from phalanx.launcher.remote import ssh_errors
from phalanx.launcher.remote.node_spec import NodeRefused
from tests.docs.blocks import ROOT

NODES = (ROOT / "docs" / "concepts" / "nodes.md").read_text()
TWO_MACHINES = (ROOT / "docs" / "tutorials" / "two-machines.md").read_text()


def test_hosts_that_cannot_take_part() -> None:
    line = "ssh: connect to host gpu-c port 22: No route to host"
    link: Any = SimpleNamespace(host="gpu-c", near=False, stderr=[line])
    differs = NodeRefused(
        what="the script train.py differs there",
        details=("sha256 1f0c8b27a9e4d310… there, 77ab02c95d1e8f46… here",),
        fix="copy it there again, or work in a folder that all hosts share",
    )
    error = ssh_errors.combined({"gpu-b": differs, "gpu-c": ssh_errors.explain(link, ssh_errors.SSH_FAILED)}, hosts=3)
    assert f"```\nphalanx: {error}\n```" in NODES


@pytest.mark.parametrize("page", [NODES, TWO_MACHINES], ids=["nodes", "two machines"])
def test_a_node_that_was_rejected(page: str) -> None:
    why = "it has script: train.py sha256 1f0c…, node 0 has script: train.py sha256 77ab…"
    names: Any = SimpleNamespace(
        name=lambda id_, host="": f"node {id_} ({host})", noun="node", managed=False, listed=lambda *_: "node 1"
    )
    roster: Any = SimpleNamespace(missing=[1], expected=2, members={0: SimpleNamespace(host="gpu-a")})
    status = RendezvousStatus(roster, names, ["10.57.23.164:29500"])
    error = status.timed_out(300, {"gpu-b at 10.57.23.165": Rejection(why, FIXES["plan"])})
    assert f"```\nphalanx: {error}\n```" in page
