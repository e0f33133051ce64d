"""Run by hand on a machine with an NVIDIA GPU: PYTHONPATH=src python tests/train/gpu_survive.py

One NCCL rank is killed, and continues from a snapshot of its GPU's memory; then one of two ranks that share the GPU is
killed (two nodes on loopback, with gloo, because NCCL refuses that), and gets its state from the other. Each result is
bit-identical to that of an undisturbed run. A line for each, "ok" or "FAILED" in front.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
STEPS = 60
DIES = 25


def train_script(folder: Path, backend: str, dies: int) -> None:
    import torch
    from torch import nn

    import phalanx

    def train(run: phalanx.Run) -> None:
        assert run.device.type == "cuda", run.device
        chance = torch.Generator().manual_seed(1)
        x, y = torch.randn(STEPS * 16, 64, generator=chance), torch.randn(STEPS * 16, 1, generator=chance)
        data = run.loader(torch.utils.data.TensorDataset(x, y), global_batch=16, shuffle=True)
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 1)).to(run.device)
        opt = torch.optim.AdamW(model.parameters())
        run.keep(model=model, opt=opt, data=data)
        net = run.wrap(model)
        for _ in run.epochs(1):
            for a, b in run.batches(data):
                if run.steps == dies and run.rank == run.world_size - 1 and not (folder / "died").exists():
                    (folder / "died").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                run.backward(nn.functional.mse_loss(net(a), b))
                run.step(opt)
        end = {name: value.flatten().tolist() for name, value in model.state_dict().items()}
        if run.group.is_main:
            (folder / "end").write_text(json.dumps([run.steps, run.group.generation, end]))

    phalanx.main(train, backend=backend or None)


def launched(folder: Path, backend: str, dies: int, nodes: int) -> tuple[list[object], str]:
    environ = {**os.environ, "PHALANX_HOME": str(folder / "home")}
    words = [sys.executable, "-m", "phalanx", "run", "-g", "1", "--snapshot-every", "1"]
    where = [["-n", str(nodes), "-i", str(node), "--master", "127.0.0.1"] if nodes > 1 else [] for node in range(nodes)]
    rest = [__file__, "train", str(folder), backend, str(dies)]
    jobs = [
        subprocess.Popen(
            [*words, *place, *rest], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for place in where
    ]
    output = "".join(job.communicate(timeout=180)[0] for job in jobs)
    if any(job.returncode for job in jobs):
        return [], output
    return json.loads((folder / "end").read_text()), output


def main() -> int:
    failed = 0
    for name, backend, nodes in (("one rank, nccl", "", 1), ("two ranks, gloo", "gloo", 2)):
        ends, texts = [], []
        for dies in (-1, DIES):
            with tempfile.TemporaryDirectory() as folder:
                end, output = launched(Path(folder), backend, dies, nodes)
                ends.append(end)
                texts.append(output)
        handed = nodes == 1 or "resumed from a snapshot in memory" not in texts[1]
        good = (
            handed
            and bool(ends[0])
            and bool(ends[1])
            and ends[0][0] == ends[1][0] == STEPS
            and ends[0][2] == ends[1][2]
        )
        failed += not good
        lines = [line for line in texts[1].splitlines() if "regrouped" in line or "memory" in line]
        print("ok    " if good else "FAILED", name, *lines, sep="  ", flush=True)
        if not good:
            print(*texts, sep="\n---\n")
            print([end[:2] for end in ends])
    return failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train_script(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    else:
        sys.exit(main())
