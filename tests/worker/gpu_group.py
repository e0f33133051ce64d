"""Run by hand on a machine with a GPU: `python tests/worker/gpu_group.py`. NCCL and gloo, exits, too many ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

EVERYTHING = str(Path(__file__).parent / "scripts" / "everything.py")
# The last statement of a process -> its exit code.
ENDS = {
    "pass": 0,
    "group.close()": 0,
    "raise SystemExit(3)": 3,
    "raise ValueError('enough')": 1,
    "work = dist.all_reduce(torch.ones(9, device=group.device), async_op=True)": 0,
}


def run(count: int, *words: str, **options: object) -> list[subprocess.CompletedProcess[str]]:
    env = {**os.environ, "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    command = [sys.executable, *(words or (EVERYTHING, json.dumps(options)))]
    jobs = [
        subprocess.Popen(
            command, env={**env, "RANK": str(rank)}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in range(count)
    ]
    outputs = [job.communicate(timeout=300) for job in jobs]
    return [
        subprocess.CompletedProcess(command, job.returncode, *text) for job, text in zip(jobs, outputs, strict=True)
    ]


def good(ranks: list[subprocess.CompletedProcess[str]], seen: str) -> None:
    for rank in ranks:
        assert rank.returncode == 0, rank.stderr
        assert seen in rank.stdout, rank.stdout
        assert "destroy_process_group" not in rank.stderr, rank.stderr
    print(f"right: {seen}, {len(ranks)} ranks", flush=True)


def main() -> None:
    good(run(1), "cpu:gloo,cuda:nccl on cuda:0")
    good(run(1, backend="nccl"), ", nccl on cuda:0")
    good(run(1, adopt="nccl"), "cuda:nccl on cuda:0")  # a process group that the script made
    for end, code in ENDS.items():
        text = f"import torch, torch.distributed as dist, phalanx\ngroup = phalanx.init()\ngroup.barrier()\n{end}"
        (alone,) = run(1, "-c", text)
        assert alone.returncode == code, (end, alone)
        assert "destroy_process_group" not in alone.stderr, alone.stderr
        print(f"right: exit code {code} after: {end}", flush=True)
        if alone.stderr and code != 1:
            print(f"  but it outputs: {alone.stderr}", flush=True)
    too_many = torch.cuda.device_count() + 1
    for rank in run(too_many):
        assert "nccl needs one each" in rank.stderr, rank.stderr
    print(f"right: {too_many} ranks on {too_many - 1} GPUs are refused", flush=True)
    good(run(too_many, backend="gloo"), "gloo on cuda:0" if too_many == 2 else "gloo on cuda:")
    good(run(too_many, device="cpu"), "shm on cpu")
    print("all right")


if __name__ == "__main__":
    main()
