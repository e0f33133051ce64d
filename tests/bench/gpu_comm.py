"""Tests `phalanx bench comm` with NCCL. Run by hand on a machine with a GPU: python tests/bench/gpu_comm.py

First one rank, which only the device memory limits: every operation must be measured and correct, in three types, and
compared with an earlier run. Then two CPU ranks with gloo.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

OPERATIONS = "all_reduce,broadcast,reduce,all_gather,all_gather_into_tensor,reduce_scatter,reduce_scatter_tensor"
OPERATIONS += ",all_to_all,all_to_all_single,gather,scatter,barrier"


def bench(work: Path, name: str, *words: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    env = {**os.environ, "PHALANX_HOME": str(work / "home")}
    line = [sys.executable, "-m", "phalanx", "bench", "comm", *words, "--json", str(work / name)]
    done = subprocess.run(line, cwd=work, env=env, capture_output=True, text=True, timeout=400)
    file = work / name
    return done, json.loads(file.read_text()) if file.exists() else {}


def measured(data: dict[str, Any]) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Return the measurements by operation, type and size. Out of place wins over in place."""
    cells = [cell for cell in data.get("measurements", []) if cell["rounds"]]
    cells.sort(key=lambda cell: cell["place"] == "out")
    return {(cell["operation"], cell["dtype"], cell["size"]): cell for cell in cells}


def main() -> int:
    work = Path(tempfile.mkdtemp(prefix="gpu-comm-"))
    nccl = ("--backends", "nccl", "-g", "1", "-b", "1M", "-e", "256M", "-f", "16", "--in-place")
    first, one = bench(work, "one.json", *nccl, "--operations", OPERATIONS, "--dtypes", "float32,bfloat16,int64")
    second, two = bench(work, "two.json", *nccl, "--operations", "all_reduce", "--compare", str(work / "one.json"))
    shared, both = bench(work, "both.json", "--backends", "gloo", "-g", "2", "--quick", "--operations", "all_reduce")
    cells, size = measured(one), 256 << 20
    copies = {name: cell for (operation, name, at), cell in cells.items() if operation == "copy" and at == size}
    gathered = cells.get(("all_gather_into_tensor", "float32", size), {})
    facts = {
        "it ended well": first.returncode == 0,
        "every operation was measured": {name for name, _, _ in cells} >= set(OPERATIONS.split(",")),
        "in every type": {name for _, name, _ in cells} >= {"float32", "bfloat16", "int64"},
        "nothing is wrong": not any(cell["wrong"] or cell["failure"] for cell in one.get("measurements", [])),
        "the device's copy speed was measured": bool(copies) and min(cell["bus"] for cell in copies.values()) > 1e11,
        "a share of it was reported": (gathered.get("share") or 0) > 0.01,
        "the GPU is named": "cuda" not in " ".join(one["ranks"][0]["devices"]) if one else False,
        "it was compared with itself": second.returncode == 0 and bool(two.get("changes")),
        "gloo, two ranks": shared.returncode == 0 and len(both.get("links", [])) == 2,
    }
    for fact, holds in facts.items():
        print("ok  " if holds else "FAIL", fact)
    for done in (first, second, shared):
        print(done.stdout[-6000:])
        if done.returncode:
            print(done.stderr[-3000:])
    return 0 if all(facts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
