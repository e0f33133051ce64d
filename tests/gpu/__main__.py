"""`make gpu-test`: all tests that need an NVIDIA GPU, on several real NCCL ranks, on a machine with at least one GPU.

A single GPU is divided into MIG slices if that is allowed (root, no other program uses it), and otherwise shared by the
ranks. Prints a line per script, and the output of those that fail. build/gpu-test has the output of each script.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN = ("-m", "phalanx", "run", "-g", "1")
LIMIT = 900.0
OPTIONS = "PHALANX_GPU_OPTIONS"  # options of `phalanx run`, for scripts with several ranks
SMALLEST = "19"  # the profile of a seventh of a GPU: A100, H100, H200
RANKS = 4  # of most scripts with several ranks
CORES = os.cpu_count() or 1


@dataclass(frozen=True)
class Script:
    path: str
    launcher: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)


# Each of these compares times, and nothing runs beside it.
ALONE = [
    Script("tests/train/gpu_check.py"),
    Script("tests/train/gpu_checkpoint.py"),
    Script("tests/train/gpu_snapshot.py"),
]
# Each of these needs a whole GPU, and others may use it too.
ONE = [
    Script("tests/bench/gpu_comm.py"),
    Script("tests/worker/gpu_group.py"),
    Script("tests/train/gpu_survive.py"),
    Script("tests/e2e/gpu_check.py"),
    Script("tests/watch/gpu_watch.py"),
    Script("tests/launcher/gpu_probe.py", launcher=RUN),
    Script("tests/launcher/spawn/gpu_spawn.py"),
    Script("tests/cluster/gpu_probe.py"),
    Script("tests/doctor/gpu_check.py"),
    Script("tests/gpu/share.py"),
]
# Several ranks. Each lane has its own devices where there are enough, and is run from its first script to its last.
LANES = [
    [Script("tests/gpu/survive.py", environ={"JOBS": str(max(1, CORES // 4))})],
    [
        Script("tests/gpu/verdicts.py"),
        Script("tests/gpu/elastic.py", environ={"JOBS": "2"}),
        Script("tests/e2e/gpu_ends.py", words=("2",)),
        Script("tests/gpu/share.py"),  # on MIG slices, if there are any
    ],
]

_printing = threading.Lock()


def answer(*words: str) -> str:
    """Return what nvidia-smi prints; "": it failed."""
    done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


@contextlib.contextmanager
def devices() -> Iterator[list[str]]:
    """Yield a device for each of at least four ranks: GPUs or MIG slices of one. Empty: ranks have to share a GPU."""
    gpus = len(answer("-L").strip().splitlines())
    busy = answer("--query-compute-apps=pid", "--format=csv,noheader").strip()
    off = "Disabled" in answer("--query-gpu=mig.mode.current", "--format=csv,noheader")
    if gpus >= RANKS:
        yield [str(index) for index in range(gpus)]
    elif os.geteuid() or busy or not off or not answer("-i", "0", "-mig", "1"):
        yield []
    else:
        try:
            for _ in range(7):
                answer("mig", "-i", "0", "-cgi", SMALLEST, "-C")
            slices = re.findall(r"UUID: (MIG-[0-9a-f-]+)", answer("-L"))
            if len(slices) >= RANKS:
                yield slices
                return
        finally:
            answer("mig", "-i", "0", "-dci")
            answer("mig", "-i", "0", "-dgi")
            answer("-i", "0", "-mig", "0")
        yield []


def passes(script: Script, visible: Sequence[str] = (), options: str = "") -> bool:
    """Run a script and print its result. `visible`: the devices that it may use; none: all."""
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, **script.environ, OPTIONS: options, "PYTHONPATH": os.pathsep.join(paths)}
    if visible:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
    began = time.monotonic()
    place = ".several" if visible or options else ""  # a script may run in both ways
    log = ROOT / "build/gpu-test" / f"{script.path.replace('/', '.')}{place}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, *script.launcher, script.path, *script.words]
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environ, stdout=output, stderr=output, timeout=LIMIT, check=False
            )
            code = str(done.returncode)
        except subprocess.TimeoutExpired:
            code = f"none after {LIMIT:.0f} s"
    good = code == "0"
    with _printing:
        print(f"{'ok    ' if good else 'FAILED'} {script.path}  {time.monotonic() - began:.0f} s", flush=True)
        if not good:
            print(f"exit code {code}\n{log.read_text(errors='replace')}", flush=True)
    return good


def on_several_ranks(lanes: Sequence[Sequence[Script]]) -> list[bool]:
    """Run the scripts with several ranks."""
    with devices() as found:
        print(f"several ranks: {f'{len(found)} devices' if found else 'one GPU is shared'}", flush=True)

        def run(lane: Sequence[Script], visible: Sequence[str]) -> list[bool]:
            return [passes(script, visible, "" if found else "--share-gpu") for script in lane]

        # The first lane has the first devices, the second has the last. They may share one.
        places = [found[:RANKS], found[-RANKS:]]
        with ThreadPoolExecutor(2 if len(found) > RANKS else 1) as pool:
            return [good for lane in pool.map(run, lanes, places) for good in lane]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="scripts whose name contains this")
    only = parser.parse_args().only
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the MIG slices are removed
    if not answer("-L").strip():
        print("no NVIDIA GPU here")
        return 2
    alone, one, *lanes = ([script for script in scripts if only in script.path] for scripts in (ALONE, ONE, *LANES))
    results = [passes(script) for script in alone]
    with ThreadPoolExecutor(max(1, CORES // 4)) as pool:
        results += pool.map(passes, one)
    if any(lanes):
        results += on_several_ranks(lanes)
    print(f"{len(results)} scripts, {results.count(False)} failed")
    return 1 if False in results else 0


if __name__ == "__main__":
    sys.exit(main())
