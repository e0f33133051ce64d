"""Run by hand on a machine with an NVIDIA GPU: python tests/doctor/gpu_check.py

Prints what the doctor reads about the GPUs, its findings, and how long that takes. Fails if there is no GPU, a query
raises, the facts cannot be sent, or the driver answers no query at all.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import msgspec

from phalanx.cluster import xids as kernel_xids
from phalanx.doctor import gpu_facts, machine
from phalanx.doctor.checks import gpus, versions
from phalanx.doctor.gpu_facts import Gpus


def main() -> int:
    wrong: list[str] = []
    environ = dict(os.environ)
    began = time.perf_counter()
    facts = gpu_facts.read(environ)
    print(f"read in {1000 * (time.perf_counter() - began):.0f} ms")
    for gpu in facts.gpus:
        print(f"GPU {gpu.index}")
        for name, value in asdict(gpu).items():
            print(f"  {name:<14} {value}")
    for name, value in asdict(facts).items():
        if name != "gpus":
            print(f"{name:<14} {value}")
    if not facts.gpus:
        wrong.append("no GPU")
    for gpu in facts.gpus:
        if gpu.memory.total == 0 or not gpu.bus or gpu.name == "GPU":
            wrong.append(f"GPU {gpu.index}: the driver answered nothing")
    if msgspec.json.decode(msgspec.json.encode(facts), type=Gpus) != facts:
        wrong.append("the facts cannot be sent")
    print(f"{len(kernel_xids.kernel_log())} records in the kernel's log can be read")
    print("versions:", versions.describe(versions.read()))
    print()
    for finding in gpus.judge(facts):
        print(f"{finding.level:<8}{finding.fact}\n        cause: {finding.cause}\n        fix:   {finding.fix}")
    print()
    for finding in machine.judge(machine.read(environ, str(Path.home()))):
        print(f"{finding.level:<8}{finding.check}: {finding.fact}")
    print(*(wrong or ["all answered"]), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
