"""Ends of scripts on NCCL, as a plain script for a machine with a GPU: python tests/e2e/gpu_ends.py [RUNS]

Each end is run several times, forked and fresh, with two ranks on two devices, or on two MIG slices of one that NCCL
takes for two hosts (NCCL_HOSTID). None may hang, and every exit code has to be right.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HEAD = """
import os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
os.environ["NCCL_HOSTID"] = "host" + os.environ["RANK"]
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
torch.cuda.set_device(0)
def train(backend="nccl"):
    dist.init_process_group(backend)
    model = DDP(torch.nn.Linear(64, 64).cuda(), device_ids=[0])
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        opt.zero_grad()
        model(torch.randn(8, 64, device="cuda")).sum().backward()
        opt.step()
    return model
"""

ENDS = {
    "destroyed, then dropped": ("model = train()\ndist.destroy_process_group()\ndel model\n", 0),
    "in a function": ("def main():\n  model = train()\n  dist.destroy_process_group()\nmain()\n", 0),
    "never destroyed": ("model = train()\ntorch.cuda.synchronize()\ndist.barrier()\n", 0),
    "gloo beside nccl": (
        "model = train('cpu:gloo,cuda:nccl')\nx = torch.ones(1)\ndist.all_reduce(x)\ndist.barrier()\n",
        0,
    ),
    "sys.exit": ("def main():\n  model = train()\n  dist.barrier()\n  sys.exit(3)\nmain()\n", 3),
    "several groups": (
        "model = train()\ngroups = [dist.new_group(backend=b) for b in ('gloo', 'nccl')]\n"
        "dist.all_reduce(torch.ones(1), group=groups[0])\ndist.destroy_process_group()\n",
        0,
    ),
    "a graph": (
        "model = train()\ng = torch.cuda.CUDAGraph()\nx = torch.ones(4, device='cuda')\n"
        "torch.cuda.synchronize()\nwith torch.cuda.graph(g):\n  y = x + 1\ng.replay()\ndist.destroy_process_group()\n",
        0,
    ),
}


def main() -> int:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    work = Path(tempfile.mkdtemp(prefix="gpu-ends-"))
    environ = {**os.environ, "PHALANX_HOME": str(work / "home")}
    bad = 0
    for end, (text, expected) in ENDS.items():
        script = work / "end.py"
        script.write_text(HEAD + text)
        for way in ((), ("--fresh",)):
            command = [
                sys.executable,
                "-m",
                "phalanx",
                "run",
                "-g",
                "2",
                *os.environ.get("PHALANX_GPU_OPTIONS", "").split(),
                *way,
                str(script),
            ]
            codes, took = [], []
            for _ in range(runs):
                start = time.monotonic()
                try:
                    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=90)
                    codes.append(done.returncode)
                    if done.returncode != expected:
                        print(done.stderr[-600:])
                except subprocess.TimeoutExpired as late:
                    codes.append(-999)
                    print((late.stderr or b"")[-600:])
                took.append(time.monotonic() - start)
            right = codes == [expected] * runs
            bad += not right
            name = f"{end}, {'fresh' if way else 'forked'}"
            print(f"{'ok ' if right else 'BAD'} {name:40} {codes} {min(took):.1f} to {max(took):.1f} s", flush=True)
    print("all right" if not bad else f"{bad} are not right")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
