"""`make gpu-test`: all tests that need an NVIDIA GPU, on several real NCCL ranks, on a machine with at least one GPU.

A single GPU is divided into four MIG slices if that is allowed (root, no other program uses it), and otherwise shared
by the ranks. Prints a line per script, and the output of those that fail. build/gpu-test has the output of each script.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ONE = (  # need a whole GPU
    "tests/cluster/gpu_probe.py",
    "tests/doctor/gpu_check.py",
    "tests/e2e/gpu_check.py",
    "tests/launcher/spawn/gpu_spawn.py",
    "tests/worker/gpu_group.py",
    "tests/train/gpu_check.py",
    "tests/train/gpu_checkpoint.py",
    "tests/train/gpu_snapshot.py",
    "tests/train/gpu_survive.py",
    "tests/bench/gpu_comm.py",
    "tests/watch/gpu_watch.py",
)
RANK = ("tests/launcher/gpu_probe.py",)  # likewise, as the only rank of a run
SEVERAL = ("tests/gpu/survive.py", "tests/gpu/verdicts.py", "tests/e2e/gpu_ends.py")
LIMIT = 900.0
OPTIONS = "PHALANX_GPU_OPTIONS"  # options of `phalanx run`, for scripts with several ranks
_SMALLEST = "19"  # the profile of a seventh of a GPU: A100, H100, H200


def asked(*words: str) -> str:
    done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


@contextlib.contextmanager
def four() -> Iterator[list[str]]:
    """Make room for four ranks. Yield the options that `phalanx run` needs for them."""
    gpus = len(asked("-L").strip().splitlines())
    busy = asked("--query-compute-apps=pid", "--format=csv,noheader").strip()
    off = "Disabled" in asked("--query-gpu=mig.mode.current", "--format=csv,noheader")
    if gpus >= 4:
        yield []
    elif os.geteuid() or busy or not off or not asked("-i", "0", "-mig", "1"):
        yield ["--share-gpu"]
    else:
        try:
            made = asked("mig", "-i", "0", "-cgi", ",".join([_SMALLEST] * 4), "-C")
            yield [] if made else ["--share-gpu"]
        finally:
            asked("mig", "-i", "0", "-dci")
            asked("mig", "-i", "0", "-dgi")
            asked("-i", "0", "-mig", "0")


def passes(script: str, options: list[str], *launcher: str) -> bool:
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {"JOBS": str(max(1, (os.cpu_count() or 1) // 4)), **os.environ, OPTIONS: " ".join(options)}
    environ["PYTHONPATH"] = os.pathsep.join(paths)
    began = time.monotonic()
    log = ROOT / "build/gpu-test" / f"{script.replace('/', '.')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                [sys.executable, *launcher, script],
                cwd=ROOT,
                env=environ,
                stdout=output,
                stderr=output,
                timeout=LIMIT,
                check=False,
            )
            code = str(done.returncode)
        except subprocess.TimeoutExpired:
            code = f"none after {LIMIT:.0f} s"
    good = code == "0"
    print(f"{'ok    ' if good else 'FAILED'} {script}  {time.monotonic() - began:.0f} s", flush=True)
    if not good:
        print(f"exit code {code}\n{log.read_text(errors='replace')}", flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="scripts whose name contains this")
    only = parser.parse_args().only
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the MIG slices are removed
    if not asked("-L").strip():
        print("no NVIDIA GPU here")
        return 2
    one, rank, several = ([script for script in scripts if only in script] for scripts in (ONE, RANK, SEVERAL))
    failed = [script for script in one if not passes(script, [])]
    failed += [script for script in rank if not passes(script, [], "-m", "phalanx", "run", "-g", "1")]
    if several:
        with four() as options:
            print(f"four ranks: {' '.join(options) or 'a device each'}", flush=True)
            failed += [script for script in several if not passes(script, options)]
    print(f"{len(one) + len(rank) + len(several)} scripts, {len(failed)} failed {' '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
