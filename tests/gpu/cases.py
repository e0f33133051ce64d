"""Trainings whose ranks are killed: the cases of survive.py."""

from __future__ import annotations

from typing import Any

STEPS = 60
EVERY_STEP = ["--snapshot-every", "1"]
LARGE = {"layers": 24, "width": 2048, "steps": 25}  # 100 million parameters: a step takes up to a second
# Besides settings of training.py: `again`: how many steps may be repeated; `lost`: how many processes are replaced, if
# it is not only those that are killed; `visible`: the number of devices.
CASES: dict[str, dict[str, Any]] = {
    "small, forward": {"kills": [[20, 2, "forward"]]},
    "small, backward": {"kills": [[20, 2, "backward"]]},
    "small, optimizer": {"kills": [[20, 2, "optimizer"]]},
    "small, idle": {"kills": [[20, 2, "idle"]]},
    "25 M": {"layers": 6, "width": 2048, "kills": [[20, 2, "backward"]]},
    "100 M": {**LARGE, "kills": [[10, 2, "backward"]]},
    "first collective": {"kills": [[0, 1, "start"]]},
    "broken context": {"kills": [[20, 2, "assert"]]},
    "rank 0": {"kills": [[20, 0, "backward"]]},
    "batch norm": {"norm": True, "kills": [[20, 0, "backward"], [30, 2, "idle"], [40, 0, "idle"]]},
    "twice": {"kills": [[20, 2, "backward"], [21, 1, "forward"], [22, 3, "backward"]]},
    "two at once": {"kills": [[20, 2, "forward"], [20, 1, "forward"]]},
    "compile": {"compile": True, "kills": [[20, 2, "optimizer"]]},
    "graph": {"graph": True, "kills": [[20, 2, "forward"]]},
    "checkpoint": {**LARGE, "checkpoints": True, "kills": [[10, 2, "idle"]]},
    "snapshot": {"layers": 6, "width": 2048, "options": EVERY_STEP, "kills": [[20, 2, "idle"]]},
    "bf16": {"precision": "bf16", "kills": [[20, 2, "backward"]]},
    "10 M": {"layers": 10, "width": 1024, "kills": [[20, 2, "backward"]]},
    "10 M, spare": {
        "layers": 10,
        "width": 1024,
        "ranks": 3,
        "samples": 12,
        "options": ["--spares", "1"],
        "kills": [[40, 2, "idle"]],
    },
    "100 M, spare": {
        **LARGE,
        "ranks": 3,
        "samples": 12,
        "options": ["--spares", "1"],
        "kills": [[20, 2, "backward"]],
    },
    "10 M, spare, twice": {
        "layers": 10,
        "width": 1024,
        "ranks": 3,
        "samples": 12,
        "options": ["--spares", "1"],
        "pause": 0.1,
        "kills": [[20, 0, "idle"], [45, 2, "idle"]],
    },
    "fsdp": {"strategy": "fsdp", "layers": 6, "kills": [[20, 2, "backward"]], "again": 20},
    "fsdp, idle": {"strategy": "fsdp", "layers": 6, "kills": [[20, 2, "idle"]], "again": 20},
    "fsdp, slow steps": {"strategy": "fsdp", "layers": 6, "pause": 0.3, "kills": [[20, 2, "backward"]], "again": 1},
    "fsdp, 100 M": {**LARGE, "strategy": "fsdp", "kills": [[10, 2, "backward"]], "again": 10},
    "fsdp, two at once": {"strategy": "fsdp", "kills": [[20, 2, "forward"], [20, 1, "forward"]], "again": 20},
    "hsdp": {"strategy": "hsdp", "layers": 6, "kills": [[20, 2, "backward"]], "again": 0},
    "hsdp, forward": {"strategy": "hsdp", "layers": 6, "kills": [[20, 1, "forward"]], "again": 0},
    "hsdp, rank 0": {"strategy": "hsdp", "layers": 6, "kills": [[20, 0, "backward"]], "again": 0},
    "hsdp, 100 M": {**LARGE, "strategy": "hsdp", "kills": [[10, 2, "backward"]], "again": 0},
    "hsdp, twice": {"strategy": "hsdp", "kills": [[20, 2, "backward"], [25, 1, "forward"]], "again": 0},
    "hsdp, two shards at once": {"strategy": "hsdp", "kills": [[20, 0, "forward"], [20, 3, "forward"]], "again": 0},
    "abort never returns": {"slow_abort": True, "kills": [[20, 2, "backward"], [40, 1, "forward"]]},
    "while an abort runs": {"kills": [[20, 2, "backward"], [0, 1, "generation 1"]]},
    "while the group forms": {"kills": [[20, 2, "backward"], [0, 1, "forming"]]},
    "endless kernel in a survivor": {"endless": [20, 1], "kills": [[20, 2, "backward"]], "lost": 2},
    "last step": {"kills": [[59, 2, "backward"]]},
    "before the capture of a graph": {"graph": True, "kills": [[0, 2, "start"]]},
    "in a checkpoint": {**LARGE, "checkpoints": True, "kills": [[10, 2, "checkpoint"]]},
    "in a snapshot": {"layers": 6, "width": 2048, "options": EVERY_STEP, "kills": [[20, 2, "snapshot"]]},
    "fsdp, in a copy": {"strategy": "fsdp", "layers": 6, "options": EVERY_STEP, "kills": [[20, 2, "copy"]], "again": 2},
    "fsdp, every 5 steps": {
        "strategy": "fsdp",
        "layers": 6,
        "options": ["--snapshot-every", "5"],
        "kills": [[22, 2, "backward"]],
        "again": 7,
    },
    "hsdp, in the handover": {
        "strategy": "hsdp",
        "layers": 6,
        "kills": [[20, 2, "backward"], [0, 2, "handover"]],
        "again": 0,
    },
    "shared": {"visible": 1, "options": ["--share-gpu"], "kills": [[20, 2, "backward"]]},
    "shared, two devices": {
        "visible": 2,
        "ranks": 3,
        "samples": 12,
        "options": ["--share-gpu"],
        "kills": [[20, 2, "backward"]],
    },
    "hsdp, both replicas": {
        "strategy": "hsdp",
        "kills": [[20, 1, "forward"], [20, 3, "forward"]],
        "options": ["--snapshot-every", "5"],
        "again": 5,
    },
}
