"""By hand, on a machine with one GPU: `python tests/join/gpu_group.py`. On nccl and gloo; too many ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

EVERYTHING = str(Path(__file__).parent / "scripts" / "everything.py")


def run(count: int, **options: object) -> list[subprocess.CompletedProcess[str]]:
    env = {**os.environ, "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    words = [sys.executable, EVERYTHING, json.dumps(options)]
    jobs = [
        subprocess.Popen(
            words, env={**env, "RANK": str(rank)}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in range(count)
    ]
    return [subprocess.CompletedProcess(words, job.wait(), *job.communicate()) for job in jobs]


def main() -> None:
    for options, backend in (({}, "cpu:gloo,cuda:nccl"), ({"backend": "nccl"}, "nccl")):
        (alone,) = run(1, **options)
        assert alone.returncode == 0, alone.stderr
        assert f"{backend} on cuda:0" in alone.stdout, alone.stdout
        assert "destroy_process_group" not in alone.stderr, alone.stderr
    import torch

    too_many = torch.cuda.device_count() + 1
    for rank in run(too_many):
        assert "nccl wants one each" in rank.stderr, rank.stderr
    for rank in run(too_many, device="cpu"):
        assert rank.returncode == 0, rank.stderr
        assert "gloo on cpu" in rank.stdout
    print("all right")


if __name__ == "__main__":
    main()
