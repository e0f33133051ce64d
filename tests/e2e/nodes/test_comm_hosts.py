"""`phalanx bench comm` where `phalanx run` can go: two hosts, over ssh."""

from __future__ import annotations

import json
from pathlib import Path

from tests.kit.lab import Lab, Sshd


def test_backends_are_measured_between_hosts(lab: Lab, ssh: Sshd, tmp_path: Path) -> None:
    words = ("--hosts", "node1:2,node2:1", "--backends", "shm,gloo", "--operations", "all_reduce,all_gather")
    words += ("--sizes", "1K,64K", "--only", "calls,pairs", "--rounds", "2", "--seconds", "0.05", "--json", "out.json")
    done = lab[0].run("bench", "comm", *words, cwd=str(tmp_path), env=ssh.env)
    assert done.code == 0, done.out + done.err  # the targets for one machine do not apply to two
    found = json.loads((tmp_path / "out.json").read_text())
    cells = {(cell["operation"], cell["backend"], cell["size"]): cell for cell in found["measurements"]}
    assert not any(cell["failure"] or cell["wrong"] for cell in cells.values()), done.out + done.err
    for backend in ("shm", "gloo"):
        assert cells["all_reduce", backend, 65536]["ranks"] == 3
        assert {(link["source"], link["target"]) for link in found["links"] if link["backend"] == backend} == {
            (a, b) for a in range(3) for b in range(3) if a != b
        }
