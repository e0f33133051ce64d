"""Ranks die on real NCCL. The others stay, and the result is bitwise equal to that of an undisturbed run.

python tests/gpu/survive.py [CASE …]       run these cases; default: all of cases.py
JOBS=4 python tests/gpu/survive.py         four cases at the same time
python tests/gpu/survive.py cost           measure what recovery costs a training without failures
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from cases import CASES, STEPS

JOBS = int(os.environ.get("JOBS", "1"))  # cases at the same time, which makes recoveries slower
SCRIPT = str(Path(__file__).parent / "training.py")


@dataclass
class Outcome:
    code: int | None
    seconds: float
    text: str
    end: dict[str, Any]
    kills: dict[str, float] = field(default_factory=dict)
    pids: dict[int, list[tuple[float, int, int]]] = field(default_factory=dict)  # pid -> (time, rank, step)
    folder: Path = Path()

    def growth(self) -> list[int]:
        """Return by how much the descriptors, threads and MiB on the GPU of a process grew per recovery, at most: from
        its second recovery on, because the first one creates what later ones reuse.
        """
        found = [0, 0, 0]
        for path in self.folder.glob("steps.*"):
            rows = [line.split() for line in path.read_text().splitlines() if line.startswith("holds ")]
            held = [[int(row[3]), int(row[4]), int(row[5]) >> 20] for row in rows][1:]
            if len(held) > 1:
                per = [(after - before) // (len(held) - 1) for before, after in zip(held[0], held[-1], strict=True)]
                found = [max(pair) for pair in zip(found, per, strict=True)]
        return found

    def recoveries(self) -> list[float]:
        """Return the seconds from each kill to the next step that any rank commits in a later generation."""
        steps = sorted((moment, step) for of_pid in self.pids.values() for moment, _, step in of_pid)
        found = []
        for killed in sorted(self.kills.values()):
            later = [moment for moment, _ in steps if moment > killed]
            before = max((step for moment, step in steps if moment <= killed), default=0)
            new = [moment for moment, step in steps if moment > killed and step > before]
            found.append((new or later or [float("inf")])[0] - killed)
        return found

    def timeline(self) -> list[str]:
        """Return what the ranks did after the first kill, in seconds since then."""
        if not self.kills:
            return []
        killed = min(self.kills.values())
        found = []
        for path in self.folder.glob("began.*"):
            found.append((float(path.read_text()) - killed, f"pid {path.suffix[1:]} began"))
        for path in self.folder.glob("steps.*"):
            for line in path.read_text().splitlines():
                words = line.split()
                moment = float(words[4] if words[0] == "step" else words[-1]) - killed
                found.append((moment, f"pid {path.suffix[1:]} {' '.join(words[:4][: 3 if words[0] != 'step' else 4])}"))
        return [f"{moment:7.3f} {what}" for moment, what in sorted(found) if 0 < moment < 4][:24]

    def steps(self) -> dict[int, set[str]]:
        """Return the samples of each step, from all ranks."""
        found: dict[int, set[str]] = {}
        for path in self.folder.glob("steps.*"):
            for line in path.read_text().splitlines():
                if line.startswith("step "):
                    words = line.split()
                    found.setdefault(int(words[2]), set()).update(words[5].split(","))
        return found


def run(
    ranks: int,
    options: Sequence[str] = (),
    *,
    limit: float = 75.0 * JOBS,
    command: str = "run",
    visible: int = 0,
    **settings: Any,
) -> Outcome:
    """Run training.py. `visible`: on this number of devices; 0: on all."""
    folder = Path(tempfile.mkdtemp(prefix="survive-"))
    environ = {**os.environ, "PHALANX_HOME": str(folder / "home"), "TORCHINDUCTOR_CACHE_DIR": "/tmp/inductor"}
    if visible:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices()[:visible])
    shared = os.environ.get("PHALANX_GPU_OPTIONS", "").split()
    line = [sys.executable, "-m", "phalanx", command, "-g", str(ranks), "--no-warm", *shared, *options, SCRIPT]
    began = time.monotonic()
    with open(folder / "console", "wb") as console:
        job = subprocess.Popen(
            [*line, json.dumps({"folder": str(folder), **settings})], env=environ, stdout=console, stderr=console
        )
        try:
            code: int | None = job.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
            with contextlib.suppress(Exception):
                subprocess.run(
                    [sys.executable, "-m", "phalanx", "why"], env=environ, timeout=20, stdout=console, stderr=console
                )
            job.send_signal(signal.SIGINT)
            try:
                job.wait(20)
            except subprocess.TimeoutExpired:
                job.kill()
    seconds = time.monotonic() - began
    end = json.loads((folder / "end.json").read_text()) if (folder / "end.json").exists() else {}
    outcome = Outcome(code, seconds, (folder / "console").read_text(errors="replace"), end, folder=folder)
    for path in folder.glob("killed.*"):
        outcome.kills[path.name] = float(path.read_text())
    for path in folder.glob("steps.*"):
        rows = [line.split() for line in path.read_text().splitlines() if line.startswith("step ")]
        outcome.pids[int(path.suffix[1:])] = [(float(row[4]), int(row[1]), int(row[2])) for row in rows]
    return outcome


def devices() -> list[str]:
    """Return the devices that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if given := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return given.split(",")
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return re.findall(r"MIG-[0-9a-f-]+", listed) or [str(gpu) for gpu in range(len(listed.splitlines()))]


def exact(steps: dict[int, set[str]], count: int, samples: int) -> bool:
    """Return whether every step is complete, and no sample is missing or in two steps."""
    every = [sample for ids in steps.values() for sample in ids]
    return sorted(steps) == list(range(1, count + 1)) and len(every) == len(set(every)) == count * samples


def accounted(outcome: Outcome, count: int, samples: int) -> bool:
    """Like `exact`, for ranks that are killed at any point. A rank that dies after committing a step and before writing
    it down may omit its samples of that step. Nothing else may be missing.
    """
    steps = outcome.steps()
    every = [sample for ids in steps.values() for sample in ids]
    last = {rows[-1][2] + 1 for rows in outcome.pids.values() if rows}  # the step at which each process was
    missing = {step for step in range(1, count + 1) if len(steps.get(step, ())) < samples}
    return len(every) == len(set(every)) and set(steps) <= set(range(1, count + 1)) and missing <= last


def again(text: str) -> int:
    """Return the number of repeated steps of all recoveries."""
    return sum(map(int, re.findall(r"(\d+) steps? done again", text)))


def pace(outcome: Outcome) -> float:
    """Return the seconds per step, from the second half of the steps."""
    moments = sorted(moment for of_pid in outcome.pids.values() for moment, rank, _ in of_pid if rank == 0)
    late = moments[len(moments) // 2 :]
    return statistics.median(b - a for a, b in itertools.pairwise(late))


def cost(ranks: int = 4) -> int:
    for strategy, layers in (("ddp", 6), ("hsdp", 6), ("fsdp", 6), ("fsdp", 24)):
        settings = {"strategy": strategy, "layers": layers, "width": 2048, "steps": 240}
        paces: dict[str, list[float]] = {"off": [], "ready": []}
        summary = ""
        for _ in range(3):  # alternately, so that other load affects both
            paces["off"].append(pace(run(ranks, [*OFF], ready=False, **settings)))
            ready = run(ranks, **settings)
            paces["ready"].append(pace(ready))
            found = re.search(r"snapshots of the sharded state: .*", ready.text)
            summary = found[0] if found else ""
        off, on = (statistics.median(paces[name]) for name in ("off", "ready"))
        print(
            f"{strategy}, {layers} layers: {1e3 * off:.1f} ms per step without, {1e3 * on:.1f} with: "
            f"{100 * (on / off - 1):+.1f}%  {summary}\n        "
            + "; ".join(f"{name} {' '.join(f'{1e3 * one:.1f}' for one in of)}" for name, of in paces.items()),
            flush=True,
        )
    return 0


OFF = ("--snapshot-every", "off")


class Undisturbed:
    """The results of undisturbed trainings. Each runs once for all cases that are compared with it."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def digest(self, name: str, ranks: int, case: dict[str, Any]) -> str:
        key = json.dumps([ranks, case], sort_keys=True)
        with self._locks[key]:
            if key not in self._found:
                given = dict(case)
                quiet = run(ranks, given.pop("options", []), **given)
                self._found[key] = quiet.end.get("digest", "")
                text = f"      {name}: undisturbed: code {quiet.code}, {quiet.seconds:.1f} s"
                print(f"{text}\n{quiet.text[-3000:]}" if quiet.code != 0 else text, flush=True)
            return self._found[key]


def passes(name: str, undisturbed: Undisturbed) -> bool:
    """Run a case and print its result."""
    case = dict(CASES[name])
    kills, ranks = case.pop("kills"), case.pop("ranks", 4)
    options, allowed, lost = case.pop("options", []), case.pop("again", 0), case.pop("lost", len(kills))
    faults = {name: case.pop(name) for name in ("endless", "slow_abort") if name in case}
    if "visible" in case:  # as few ranks as may share a device
        case["options"] = options
    digest = undisturbed.digest(name, ranks, case)
    case.pop("options", None)
    found = run(ranks, options, kills=kills, **faults, **case)
    same = bool(digest) and found.end.get("digest") == digest
    whole = exact(found.steps(), case.get("steps", STEPS), case.get("samples", 8))
    repeated = again(found.text)
    stayed = len(found.pids) == ranks + lost
    quiet = not re.search(r"frame #\d+|ProcessGroupNCCL|unbatched P2P", found.text)
    quiet |= any(place == "assert" for _, _, place in kills)  # prints its own
    good = found.code == 0 and same and whole and repeated <= allowed and stayed and quiet
    times = " ".join(f"{one:.2f}" for one in found.recoveries())
    lines = [line for line in found.text.splitlines() if line.startswith("phalanx:") or not good]
    shown = [line[:220] for line in lines[: 60 if good else 150]]
    shown.append(f"console: {len(found.text.splitlines())} lines")
    if os.environ.get("TIMELINE"):
        shown += found.timeline()
    head = (
        f"{'ok    ' if good else 'FAILED'} {name}: code {found.code}, {found.seconds:.1f} s, recovered in {times}, "
        f"{len(found.pids)} processes for {ranks} ranks and {len(kills)} kills, same end: {same}, "
        f"samples: {whole}, steps done again: {repeated} of {allowed} allowed, survivors stayed: {stayed}, "
        f"quiet: {quiet}, growth per recovery: {found.growth()}"
    )
    print("\n        ".join([head, *shown]), flush=True)
    if os.environ.get("OUT"):
        (Path(os.environ["OUT"]) / f"console-{re.sub(r'[^a-z0-9]+', '-', name)}.txt").write_text(found.text)
    return good


def main(argv: list[str]) -> int:
    if argv == ["cost"]:
        return cost(4)
    undisturbed = Undisturbed()
    with ThreadPoolExecutor(JOBS) as pool:
        good = [*pool.map(lambda name: passes(name, undisturbed), argv or CASES)]
    return good.count(False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
