"""One of two nodes is lost, on real NCCL: the ranks of the other continue, and no sample is lost or used twice.

python tests/gpu/elastic.py [STRATEGY …]        default: hsdp fsdp
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from survive import JOBS, SCRIPT, STEPS, again, devices


def passes(strategy: str) -> bool:
    """Run two nodes, kill the second one, and print the result."""
    folder, seen = Path(tempfile.mkdtemp(prefix="elastic-")), devices()
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    settings = {"folder": str(folder), "strategy": strategy, "layers": 6, "kills": [[20, 3, "node"]]}
    jobs, began, token = [], time.monotonic(), secrets.token_hex(32)
    with open(folder / "console", "wb") as console:
        for node in (0, 1):
            environ = {**os.environ, "PHALANX_HOME": str(folder / f"home{node}"), "NCCL_SOCKET_IFNAME": "=lo"}
            environ["PHALANX_TOKEN"] = token
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(seen[2 * node : 2 * node + 2] or seen)
            options = ["-n", "1:2", "--last-call", "60s", "-g", "2", "-i", str(node), "--master", address, "--no-warm"]
            options += os.environ.get("PHALANX_GPU_OPTIONS", "").split()
            command = [sys.executable, "-m", "phalanx", "run", *options, SCRIPT, json.dumps(settings)]
            jobs.append(subprocess.Popen(command, env=environ, stdout=console, stderr=console))
        try:
            while not (folder / "killed.20.3.node").exists() and jobs[0].poll() is None:
                if time.monotonic() - began > 75.0 * JOBS:
                    break
                time.sleep(0.01)
            jobs[1].kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                jobs[0].wait(60.0 * JOBS)
        finally:
            for job in jobs:
                job.kill()
                job.wait()
    found: dict[int, list[str]] = defaultdict(list)  # step -> samples
    for path in folder.glob("steps.*"):
        rows = [line.split() for line in path.read_text().splitlines() if line.startswith("step ")]
        for row in rows:
            found[int(row[2])] += row[5].split(",")
    text = (folder / "console").read_text(errors="replace")
    if repeated := again(text):  # then these steps are written twice
        found = defaultdict(list, {step: [*set(samples)] for step, samples in found.items()})
    whole = sorted(found) == list(range(1, STEPS + 1)) and all(len(set(ids)) == len(ids) == 8 for ids in found.values())
    good = jobs[0].returncode == 0 and whole and not (repeated and strategy == "hsdp")
    name = f"{strategy}, a node is lost"
    print(
        f"{'ok    ' if good else 'FAILED'} {name}: code {jobs[0].returncode}, {time.monotonic() - began:.1f} s, ",
        end="",
    )
    print(f"samples: {whole}, steps done again: {repeated}", flush=True)
    if not good:
        print(text[-6000:], flush=True)
    return good


if __name__ == "__main__":
    sys.exit([passes(strategy) for strategy in sys.argv[1:] or ("hsdp", "fsdp")].count(False))
