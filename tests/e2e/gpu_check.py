"""Checks that need a real GPU, as a plain script: python tests/e2e/gpu_check.py

One GPU is enough. NCCL allows one rank per GPU, so the world has one rank.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORK = Path(tempfile.mkdtemp(prefix="gpu-check-"))
failures: list[str] = []

SCRIPTS = {
    "nccl": """
import os, sys, torch, torch.distributed as dist
assert not torch.cuda.is_initialized()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
x = torch.ones(4, device="cuda")
dist.all_reduce(x)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).cuda())
opt = torch.optim.AdamW(model.parameters())
model(torch.randn(4, 8, device="cuda")).sum().backward()
opt.step()
print("nccl", x.sum().item(), torch.cuda.get_device_name(), os.environ.get("CUDA_VISIBLE_DEVICES"))
del model
dist.destroy_process_group()
""",
    "seen": "import os, torch; print('seen', torch.cuda.device_count(), os.environ.get('CUDA_VISIBLE_DEVICES'), "
    "os.environ['LOCAL_RANK'], torch.ones(1, device='cuda').item() if torch.cuda.is_available() else 'no cuda')",
    "bad": "import torch\ntorch.ones(1, device='cuda')\n",
    "quiet": "import ctypes\nassert ctypes.CDLL('libcuda.so.1').cuInit(0) == 0\n",
}


def phalanx(*args: str, **env: str) -> tuple[int, str, float]:
    start = time.monotonic()
    environ = {**os.environ, "PHALANX_HOME": str(WORK / "home"), **env}
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", *args], cwd=WORK, env=environ, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout + done.stderr, time.monotonic() - start


def check(name: str, args: tuple[str, ...], code: int, *words: str, **env: str) -> None:
    got, text, took = phalanx(*args, **env)
    missing = [word for word in words if word not in text]
    fine = got == code and not missing
    print(f"{'ok  ' if fine else 'FAIL'} {name} ({took:.1f} s)")
    if not fine:
        failures.append(name)
        print(f"  exit {got}, expected {code}; missing {missing}\n{text}")


def main() -> int:
    for name, text in SCRIPTS.items():
        (WORK / f"{name}.py").write_text(text)
    check("one rank a GPU by default, nccl after a fork", ("run", "nccl.py"), 0, "nccl 4.0", "1 rank,")
    check("fresh", ("run", "--fresh", "nccl.py"), 0, "nccl 4.0")
    check("isolate", ("run", "--isolate", "seen.py"), 0, "seen 1 0 0 1.0")
    check("virtual local rank", ("run", "--virtual-local-rank", "seen.py"), 0, "seen 1 0 0 1.0")
    check("devices", ("run", "--devices", "0", "seen.py"), 0, "seen 1 0 0 1.0")
    check("cpu ranks on a GPU machine", ("run", "-g", "2", "--cpu", "seen.py"), 0, "seen 0  1 no cuda")
    check("more than there are", ("run", "-g", "3", "seen.py"), 2, "phalanx run -g 1", "--cpu")
    check("hidden", ("run", "-g", "2", "seen.py"), 0, "seen 0  0 no cuda", CUDA_VISIBLE_DEVICES="")
    check("hidden by mistake", ("run", "seen.py"), 2, "CUDA_VISIBLE_DEVICES", CUDA_VISIBLE_DEVICES="7")
    check("CUDA used while importing", ("run", "--preload", "bad", "seen.py"), 0, "CUDA was initialised", "seen 1")
    check(
        "CUDA used behind torch's back", ("run", "--preload", "quiet", "seen.py"), 0, "CUDA was initialised", "seen 1"
    )
    check("plan", ("plan", "nccl.py"), 0, "gpu 0 NVIDIA")
    print(phalanx("warm")[1].strip())
    for _ in range(2):
        check("warm", ("run", "--env", "OMP_NUM_THREADS=1", "nccl.py"), 0, "nccl 4.0")
    print(phalanx("warm", "--stop")[1].strip())
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
