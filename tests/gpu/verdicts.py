"""What `phalanx run` says about hangs and mismatches on real NCCL. On a machine with a GPU:

    python tests/gpu/verdicts.py                      # 4 GPUs, or 4 MIG slices
    python tests/gpu/verdicts.py --share-gpu          # 4 ranks on one GPU: options go to `phalanx run`
    python tests/gpu/verdicts.py --only shape,skips   # some of the cases

Each case is a small script that hangs. The first verdict has to match; it is printed if it does not.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RANKS = 4
LIMIT = 120.0  # seconds per case
STALL_AFTER = "5s"

# Steps are counted by the optimizer. A rank that computes before its first step has ten times the limit.
BEGIN = """
import os, sys, time
import torch
import torch.distributed as dist

rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local % torch.cuda.device_count())
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
weight = torch.nn.Parameter(torch.ones(8, device=device))
optimizer = torch.optim.SGD([weight], lr=1e-3)


def step():
    weight.grad = torch.ones_like(weight)
    optimizer.step()


x = torch.ones(1000, device=device)
y = torch.ones(10, device=device)
"""


@dataclass
class Case:
    script: str
    kind: str  # kind of the first verdict
    ranks: list[int]
    patterns: list[str]  # patterns for its text
    details: list[str] = field(default_factory=list)  # patterns, each for one of its details
    environ: dict[str, str] = field(default_factory=dict)
    alone: bool = False  # needs a separate GPU per rank, which reports its utilization


CASES: dict[str, Case] = {
    # NCCL matches the two calls, with wrong results. The hang comes later, and rank 1 causes that too.
    "operation": Case(
        """
for number in range(1, 51):
    step()
    if rank == 1 and number == 31:
        dist.broadcast(x, 0)  # here
    else:
        dist.all_reduce(x)  # there
    torch.cuda.synchronize() if number < 31 else None
if rank != 1:
    dist.all_reduce(y)
    torch.cuda.synchronize()
time.sleep(1000)
""",
        "wrong operation",
        [1],
        [r"rank 1 called broadcast at case\.py:HERE where the other 3 called all_reduce at case\.py:THERE \(#31\)"],
        [r"rank 1: broadcast #31 \[1000\] float32", r"rank 0: all_reduce #31 \[1000\] float32"],
    ),
    "shape": Case(
        """
for number in range(1, 51):
    step()
    dist.all_reduce(y)
    if rank == 2 and number == 16:
        dist.all_reduce(x[:500])  # here
    else:
        dist.all_reduce(x)  # there
    torch.cuda.synchronize() if number < 16 else None
if rank != 2:
    dist.all_reduce(y)
torch.cuda.synchronize()
time.sleep(1000)
""",
        "shapes differ",
        [2],
        [r"shapes differ in all_reduce #32", r"rank 2 has \[500\]", r"the other 3 have \[1000\]"],
    ),
    "dtype": Case(
        """
for number in range(1, 51):
    step()
    dist.all_reduce(x.to(torch.int32) if rank == 3 and number == 31 else x)  # here
    torch.cuda.synchronize() if number < 31 else None
if rank != 3:
    dist.all_reduce(y)
torch.cuda.synchronize()
time.sleep(1000)
""",
        "dtypes differ",
        [3],
        [r"dtypes differ in all_reduce #31 at case\.py:HERE", r"rank 3 has int32, the other 3 have float32"],
    ),
    "skips": Case(
        """
for number in range(1, 51):
    step()
    dist.all_reduce(y)
    if not (rank == 1 and number == 16):
        dist.all_reduce(x)  # there
    torch.cuda.synchronize() if number < 16 else None
torch.cuda.synchronize()
time.sleep(1000)
""",
        "skipped collective",
        [1],
        [r"rank 1 skipped a collective that the other 3 called.*case\.py:THERE", r"#32"],
    ),
    "kernel": Case(
        """
for number in range(1, 31):
    step()
    dist.all_reduce(x)
    torch.cuda.synchronize()
if rank == 1:
    torch.cuda._sleep(1 << 40)  # ten minutes
    torch.cuda.synchronize()  # here
dist.all_reduce(x)
torch.cuda.synchronize()
""",
        "gpu",
        [1],
        [
            r"rank 1 waits for the GPU.*at case\.py:HERE: a kernel does not end",
            r"the other 3 wait for it in all_reduce #31",
        ],
    ),
    "kernel before a collective": Case(
        """
for number in range(1, 31):
    step()
    dist.all_reduce(x)
    torch.cuda.synchronize()
if rank == 1:
    torch.cuda._sleep(1 << 40)  # ten minutes
dist.all_reduce(x)
print(x.sum().item())  # here
""",
        "gpu",
        [1],
        [
            r"rank 1 waits for the GPU.*a kernel does not end, and all_reduce #31",
            r"the other 3 wait for it in all_reduce #31",
        ],
        environ={"TORCH_NCCL_ENABLE_TIMING": "1"},
    ),
    "busy loop": Case(
        """
for number in range(1, 31):
    step()
    dist.all_reduce(x)
    torch.cuda.synchronize()
if rank == 1:
    count = 0
    while True:
        count += 1  # here
dist.all_reduce(x)
torch.cuda.synchronize()
""",
        "loop",
        [1],
        [r"rank 1 (loops|computes on the CPU)", r"case\.py:\d+", r"the other 3 wait for it in all_reduce #31"],
    ),
    "busy loop, idle GPU": Case(
        """
for number in range(1, 31):
    step()
    dist.all_reduce(x)
    torch.cuda.synchronize()
if rank == 1:
    count = 0
    while True:
        count += 1  # here
dist.all_reduce(x)
torch.cuda.synchronize()
""",
        "loop",
        [1],
        [r"rank 1 computes on the CPU, or loops, while the GPU is idle \(GPU \d+, [0-5]% in use\)"],
        alone=True,
    ),
    "healthy": Case(
        """
for number in range(1, 21):
    step()
    dist.all_reduce(x)
    gathered = [torch.empty(rank_ + 1, device=device) for rank_ in range(dist.get_world_size())]
    dist.all_gather(gathered, torch.ones(rank + 1, device=device))
    splits = [rank + 1] * dist.get_world_size()
    got = torch.empty(sum(range(1, dist.get_world_size() + 1)), device=device)
    given = torch.ones(sum(splits), device=device)
    dist.all_to_all_single(got, given, [each + 1 for each in range(dist.get_world_size())], splits)
    if rank == 0:
        dist.send(y, 1)
    elif rank == 1:
        dist.recv(y, 0)
    partner = (rank + 1) % dist.get_world_size()
    before = (rank - 1) % dist.get_world_size()
    ops = [dist.P2POp(dist.isend, x, partner), dist.P2POp(dist.irecv, x.clone(), before)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    parts = [torch.ones(5, device=device) for _ in range(dist.get_world_size())]
    dist.scatter(torch.empty(5, device=device), parts if rank == 0 else None, src=0)
    objects = [None] * dist.get_world_size()
    dist.all_gather_object(objects, "x" * rank * 9)
    torch.cuda.synchronize()
if rank == 1:
    time.sleep(1000)  # here
dist.all_reduce(x)
torch.cuda.synchronize()
""",
        "sleep",  # there is no difference before it
        [1],
        [r"rank 1 is sleeping at case\.py:HERE", r"the other 3 wait for it in all_reduce"],
    ),
}


def line_of(script: str, mark: str) -> str:
    numbers = [str(number) for number, line in enumerate(script.splitlines(), 1) if line.endswith(f"# {mark}")]
    return numbers[0] if numbers else r"\d+"


def run(case: Case, options: list[str]) -> tuple[str, Path]:
    folder = Path(tempfile.mkdtemp(prefix="verdicts-"))
    script = folder / "case.py"
    script.write_text(BEGIN + case.script)
    environ = {**os.environ, "PHALANX_HOME": str(folder / "home"), **case.environ}
    line = [sys.executable, "-m", "phalanx", "run", "-g", str(RANKS), "--no-warm", "--stall-timeout", STALL_AFTER]
    with open(folder / "console", "wb") as console:
        job = subprocess.Popen(
            [*line, "--on-hang", "stop", *options, str(script)], env=environ, stdout=console, stderr=console
        )
        try:
            job.wait(LIMIT)
        except subprocess.TimeoutExpired:
            console.write(b"\n-- no end within the limit; phalanx why:\n")
            console.flush()
            with contextlib.suppress(Exception):
                why = [sys.executable, "-m", "phalanx", "why"]
                subprocess.run(why, env=environ, timeout=30, stdout=console, stderr=console)
            job.send_signal(signal.SIGINT)
            try:
                job.wait(30)
            except subprocess.TimeoutExpired:
                job.kill()
                job.wait()
    return (folder / "console").read_text(errors="replace"), folder


def verdicts_in(folder: Path) -> list[dict[str, Any]]:
    paths = sorted(folder.glob("home/**/stall_*/verdict.json"))
    with contextlib.suppress(OSError, ValueError):
        return list(json.loads(paths[-1].read_text())) if paths else []
    return []


def judge(case: Case, folder: Path) -> list[str]:
    """Return what differs from the expectation."""
    found = verdicts_in(folder)
    if not found:
        return ["no verdict"]
    first, wrong = found[0], []
    if first["kind"] != case.kind:
        wrong.append(f"kind {first['kind']!r} instead of {case.kind!r}")
    if first["ranks"] != case.ranks:
        wrong.append(f"ranks {first['ranks']} instead of {case.ranks}")
    script = BEGIN + case.script
    for pattern in case.patterns:
        wanted = pattern.replace("THERE", line_of(script, "there")).replace("HERE", line_of(script, "here"))
        if not re.search(wanted, str(first["text"])):
            wrong.append(f"the text does not match {wanted!r}")
    details = [str(detail) for detail in first.get("details", [])]
    missing = [pattern for pattern in case.details if not any(re.search(pattern, detail) for detail in details)]
    wrong += [f"no detail matches {pattern!r}" for pattern in missing]
    return wrong


def unexplained(folder: Path) -> bool:
    """Return whether the GPU utilization of rank 1 is unknown, or others use that GPU too."""
    for path in sorted(folder.glob("home/**/stall_*/evidence.json"))[:1]:
        gpu = json.loads(path.read_text())["ranks"][1].get("gpu") or {}
        return bool(gpu.get("use", -1.0) < 0 or gpu.get("shared"))
    return False


def what_was_seen(folder: Path) -> str:
    """Return the groups, newest calls, history, GPU and innermost frames of the main thread of each rank."""
    paths = sorted(folder.glob("home/**/stall_*/evidence.json"))
    if not paths:
        return "no evidence was written"
    lines = []
    for rank in json.loads(paths[-1].read_text())["ranks"]:
        main = next((thread for thread in rank.get("threads", []) if thread.get("main")), {"frames": []})
        where = [f"{Path(frame['file']).name}:{frame['line']} {frame['function']}" for frame in main["frames"][:4]]
        calls = [
            f"{call['op']} #{call['seq']} done={call.get('done', False)} started={call.get('started')}"
            for call in rank.get("calls", [])[-3:]
        ]
        history = rank.get("history", {})
        kept = [
            f"{each['group']}/{each['backend']}: {len(each['seqs'])} {each['seqs'][:1]}..{each['seqs'][-1:]}"
            for each in history.get("groups", [])
        ]
        lines.append(
            f"rank {rank['rank']}: phase {rank.get('phase')}, note {rank.get('note', '')!r}, gpu {rank.get('gpu')}\n"
            f"    at {where}\n    calls {calls}\n    history {kept}, {len(history.get('signatures', []))} signatures\n"
            f"    groups {rank.get('groups')}"
        )
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    names = list(CASES)
    if "--only" in argv:
        at = argv.index("--only")
        names, argv = argv[at + 1].split(","), [*argv[:at], *argv[at + 2 :]]
    options = [*argv, *os.environ.get("PHALANX_GPU_OPTIONS", "").split()]
    shares = "--share-gpu" in options
    failed = 0
    for name in names:
        case = CASES[name]
        if case.alone and shares:
            print(f"skipped  {name}: needs a GPU for every rank", flush=True)
            continue
        began = time.monotonic()
        text, folder = run(case, options)
        if case.alone and unexplained(folder):
            print(f"skipped  {name}: the driver does not report the utilization of each GPU", flush=True)
            continue
        wrong = judge(case, folder)
        failed += bool(wrong)
        print(f"{'FAILED' if wrong else 'ok':8} {name} ({time.monotonic() - began:.0f} s)", flush=True)
        for verdict in verdicts_in(folder)[: 3 if wrong else 1]:
            print(f"         {verdict['kind']} {verdict['ranks']}: {verdict['text']}")
            for detail in verdict.get("details", []) if wrong else []:
                print(f"           {detail}")
        if wrong:
            print("\n".join(f"         - {each}" for each in wrong))
            print("-- console:\n" + "\n".join(text.splitlines()[-60:]))
            print("-- seen:\n" + what_was_seen(folder) + f"\n-- all of it: {folder}\n", flush=True)
    print(f"{len(names) - failed} of {len(names)} ok" if not failed else f"{failed} of {len(names)} FAILED")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
