"""Checks of `--share-gpu`, as a plain script: python tests/gpu/share.py

One GPU or MIG slice is enough: the first of CUDA_VISIBLE_DEVICES, or else of the machine. With two, three ranks share
them. Prints a line per check; the exit code is 1 if one fails.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORK = Path(tempfile.mkdtemp(prefix="gpu-share-"))
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"
LIMIT = 180.0
failures: list[str] = []

PROBE = """
import json, os, torch, torch.distributed as dist
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
rank, ranks = dist.get_rank(), dist.get_world_size()
x = torch.full((1024,), rank + 1.0, device="cuda")
dist.all_reduce(x)
device = torch.cuda.get_device_properties(0)

def refused(part):
    try:
        torch.empty(int(device.total_memory * part), dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        return str(error)
    torch.cuda.empty_cache()
    return ""

found = {"rank": rank, "sum": [x.min().item(), x.max().item()], "uuid": str(device.uuid)}
for turn in range(ranks):  # one after another: the memory that another rank has would be refused too
    if turn == rank:
        found |= {"tenth": refused(0.1), "most": refused(0.6), "limit": torch.cuda.get_per_process_memory_fraction()}
    dist.barrier(device_ids=[0])
names = ("CUDA_VISIBLE_DEVICES", "NCCL_HOSTID", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
found |= {name: os.environ.get(name, "") for name in names}
with open(os.path.join(os.environ["FOUND"], str(rank)), "w") as file:
    json.dump(found, file)
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Result:
    code: int
    text: str
    ranks: list[dict[str, Any]]  # what the probe found, by rank

    def values(self, name: str) -> list[Any]:
        return [rank[name] for rank in self.ranks]


def run(devices: list[str], *options: str, **env: str) -> Result:
    found = Path(tempfile.mkdtemp(dir=WORK))
    inherited = {name: value for name, value in os.environ.items() if name not in (*ALLOCATOR, "NCCL_HOSTID")}
    own = {"PHALANX_HOME": str(WORK / "home"), "FOUND": str(found), "CUDA_VISIBLE_DEVICES": ",".join(devices)}
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "run", *options, "probe.py"],
        cwd=WORK,
        env={**inherited, **own, **env},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    ranks = [json.loads(path.read_text()) for path in found.iterdir()]
    return Result(done.returncode, done.stdout + done.stderr, sorted(ranks, key=lambda one: one["rank"]))


def check(name: str, began: float, result: Result, **facts: bool) -> None:
    wrong = [fact for fact, good in facts.items() if not good]
    print(f"{'FAIL' if wrong else 'ok  '} {name} ({time.monotonic() - began:.1f} s)", flush=True)
    if wrong:
        failures.append(name)
        print(
            f"  wrong: {', '.join(wrong)}; exit code {result.code}\n{json.dumps(result.ranks, indent=2)}\n{result.text}"
        )


def shared(name: str, devices: list[str], ranks: int, **env: str) -> None:
    """Run more ranks than devices. Each has to be connected to the others, and limited to its share."""
    began = time.monotonic()
    result = run(devices, "-g", str(ranks), "--share-gpu", **env)
    count = len(devices)
    noun = ("MIG slice" if devices[0].startswith("MIG-") else "GPU") + ("s" if count > 1 else "")
    note = f"{ranks} ranks share {count} {noun}: to try and debug a script, not for speed"
    places = [(rank["CUDA_VISIBLE_DEVICES"], rank["uuid"]) for rank in result.ranks]
    hosts = result.values("NCCL_HOSTID")
    check(
        name,
        began,
        result,
        exit_code=result.code == 0,
        note_once=result.text.count(note) == 1,
        all_ranks=result.values("rank") == list(range(ranks)),
        sum=all(each == [ranks * (ranks + 1) / 2] * 2 for each in result.values("sum")),
        devices_in_turn=[places.index(place) for place in places] == [rank % count for rank in range(ranks)],
        host_ids=all(hosts) and len(set(hosts)) == ranks,
        a_tenth_is_allowed=not any(result.values("tenth")),
        more_than_half_is_refused=all("out of memory" in each for each in result.values("most")),
        limit=all(0 < each <= 0.5 for each in result.values("limit")),
        settings_kept=all(value in each for variable, value in env.items() for each in result.values(variable)),
    )


def refused(name: str, device: str) -> None:
    began = time.monotonic()
    result = run([device], "-g", "2")
    named = "--share-gpu for 2 ranks on it" in result.text
    check(name, began, result, exit_code=result.code == 2, names_the_option=named, no_rank=not result.ranks)


def visible() -> list[str]:
    """Return the devices that this script may use."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if chosen:
        return [entry.strip() for entry in chosen.split(",")]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return []
    return re.findall(r"UUID: (MIG-[0-9a-f-]+)", listed) or re.findall(r"UUID: (GPU-[0-9a-f-]+)", listed)


def main() -> int:
    devices = visible()
    if not devices:
        print("no NVIDIA GPU here")
        return 2
    (WORK / "probe.py").write_text(PROBE)
    first = devices[:1]
    kind = "MIG slice" if first[0].startswith("MIG-") else "GPU"
    shared(f"two ranks on one {kind}", first, 2)
    for variable in ALLOCATOR:
        shared(f"the same with {variable}={EXPANDABLE}", first, 2, **{variable: EXPANDABLE})
    refused("without --share-gpu", first[0])
    if len(devices) > 1:
        shared("three ranks on two devices", devices[:2], 3)
    else:
        print("skipped three ranks on two devices: there is one")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
