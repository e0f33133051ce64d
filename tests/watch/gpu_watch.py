"""What is shown of a run on a GPU, as a plain script for a machine with one: python tests/watch/gpu_watch.py

One NCCL rank trains for some seconds; its samples, the page's metrics and the report must show the GPU at work.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

SCRIPT = """
import time, torch, phalanx

def train(run):
    net = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(8)]).to(run.device)
    opt = torch.optim.AdamW(net.parameters())
    data = run.loader(torch.utils.data.TensorDataset(torch.randn(200_000, 4096)), batch_size=1024)
    run.keep(model=net, opt=opt, data=data)
    model = run.wrap(net)
    began = time.monotonic()
    for _ in run.epochs(100):
        for (x,) in run.batches(data):
            loss = model(x.to(run.device)).pow(2).mean()
            run.backward(loss)
            run.step(opt, loss=loss)
            if time.monotonic() - began > 20:
                return

phalanx.main(train)
"""


def main() -> int:
    work = Path(tempfile.mkdtemp(prefix="gpu-watch-"))
    (work / "train.py").write_text(SCRIPT)
    env = {**os.environ, "PHALANX_HOME": str(work / "home")}
    phalanx = [sys.executable, "-m", "phalanx"]
    run = subprocess.Popen(
        [*phalanx, "run", "--page", "train.py"],
        cwd=work,
        env=env,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert run.stderr is not None
    link = next(found for line in run.stderr if (found := re.search(r"(http://\S+?)/?#(\S+)", line)))
    time.sleep(16)  # the GPU is queried every five seconds
    asked = urllib.request.Request(f"{link[1]}/metrics", headers={"Authorization": f"Bearer {link[2]}"})
    with urllib.request.urlopen(asked, timeout=20) as answer:
        metrics = answer.read().decode()
    _, rest = run.communicate(timeout=120)
    (folder,) = (work / "home" / "runs").iterdir()
    events = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    samples = [event["ranks"][0] for event in events if event["event"] == "sample"]
    measured = [event for event in events if event["event"] == "metrics"]
    report = subprocess.run([*phalanx, "report", "-o", str(work / "run.html")], cwd=work, env=env, capture_output=True)
    facts = {
        "it ended well": run.returncode == 0,
        "GPU use was seen": max(sample[8] for sample in samples) > 0.2,
        "GPU memory was seen": max(sample[9] for sample in samples) > 1 << 30,
        "samples per second were reported": max(sample[10] for sample in samples) > 0,
        "the loss was reported": len(measured) > 3 and measured[-1]["values"]["loss"] is not None,
        "metrics have the GPU": any(line.startswith("phalanx_rank_gpu") for line in metrics.splitlines()),
        "phases were seen": "b" in "".join(sample[2] for sample in samples).lower(),
        "there is a report": report.returncode == 0,
    }
    for fact, holds in facts.items():
        print("ok  " if holds else "FAIL", fact)
    print("last sample:", samples[-3], "last measured:", measured[-1] if measured else None)
    if not all(facts.values()):
        print(rest[-3000:], [line for line in metrics.splitlines() if "gpu" in line][:10], report.stderr[-2000:])
    return 0 if all(facts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
