"""One run of one kind: by torchrun, or by phalanx in one of its ways to start a worker.

with Lane() as lane:
    expected = lane.torchrun(kind)
    for way in WAYS:
        first, second = lane.phalanx(kind, way), lane.phalanx(kind, way)
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tests.faithful import hangs
from tests.faithful.kinds import Kind
from tests.faithful.outcome import Outcome, files, leftovers, logs, mask, shown, worker_code
from tests.kit.cli import PHALANX, TORCHRUN, Handle, phalanx, start

# way -> options of `phalanx run`. Warm: a fork server that has torch imported is waiting.
WAYS = {"cold": (), "fresh": ("--fresh",), "warm": ()}
LIMIT = 60.0  # seconds; most runs take less than 8
# A run beyond the limit may only be slow, on a loaded machine: it hangs once its processes stop using the CPU.
SLICE = 5.0
SLICES = 60
IDLE = 0.03
PREFIX = "<${rank}>"
OLD_LAUNCHER = (*TORCHRUN[:-1], "torch.distributed.launch")
# Variables of the shell that a launcher or torch would read.
FOREIGN = ("PET_", "PHALANX_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_", "TORCH_")


@dataclass(frozen=True)
class Ended:
    """The end of a launcher; without a code, where its processes were at the timeout."""

    code: int | None
    out: str
    err: str
    seconds: float
    stacks: str = ""


class Lane:
    """Folders and a warm fork server for consecutive runs. Lanes can run concurrently."""

    def __init__(self, limit: float = LIMIT) -> None:
        self._limit = limit
        self.root = tempfile.mkdtemp(prefix="faithful-")
        self._tmp, self._logs = f"{self.root}/tmp", f"{self.root}/logs"
        self._homes = {way: f"{self.root}/{way}" for way in WAYS}
        self._warm = False

    def __enter__(self) -> Lane:
        return self

    def __exit__(self, *_: object) -> None:
        if self._warm:
            phalanx("warm", "--stop", env=self._env("warm"))
        shutil.rmtree(self.root, ignore_errors=True)

    def torchrun(self, kind: Kind) -> Outcome:
        launcher = OLD_LAUNCHER if kind.old_launcher else TORCHRUN
        ended = self._run(kind, (*launcher, "--redirects", "3"), "")
        if ended.code is None:
            return Outcome(None, seconds=ended.seconds, note=ended.stacks)
        return self._outcome(kind, worker_code(ended.code, ended.err), ended.seconds)

    def phalanx(self, kind: Kind, way: str) -> Outcome:
        if way == "warm":
            self.warm_up()
        options = ["--quiet", "--verbose", "--no-page", "--cpu", "--log-line-prefix-template", PREFIX, *WAYS[way]]
        if kind.old_launcher:
            options.append("--pass-local-rank")
        ended = self._run(kind, (*PHALANX, "run", *options), way)
        if ended.code is None:
            return Outcome(None, seconds=ended.seconds, note=ended.stacks)
        outcome = self._outcome(kind, ended.code, ended.seconds)
        console = _console(outcome.streams, kind, ended.out, ended.err)
        return replace(outcome, streams={**outcome.streams, **console}, note=self._note(way, ended.err))

    def _run(self, kind: Kind, launcher: Sequence[str], way: str) -> Ended:
        """Run it to its end or to the limit. Every run of a kind has the same paths."""
        work = f"{self.root}/{kind.name}"
        kind.lay_out(work)
        for folder in (self._tmp, self._logs):
            shutil.rmtree(folder, ignore_errors=True)
            os.makedirs(folder)
        options = ("--nproc-per-node", str(kind.ranks), "--log-dir", self._logs)
        env = self._env(way) | dict(kind.env)
        with start(words=(*launcher, *options, *kind.command), cwd=work, env=env, input=kind.input) as job:
            code = self._wait(job, work)
            where = hangs.dump(hangs.inside(work, job.pid)) if code is None else ""
            return Ended(code, job.out, job.err, (job.ended or time.monotonic()) - job.started, where)

    def _wait(self, job: Handle, work: str) -> int | None:
        """Return the exit code, or None if the run hangs."""
        with contextlib.suppress(AssertionError):
            return job.wait(self._limit)
        used = hangs.cpu_seconds(hangs.inside(work))
        for _ in range(SLICES):
            with contextlib.suppress(AssertionError):
                return job.wait(SLICE)
            before, used = used, hangs.cpu_seconds(hangs.inside(work))
            if used - before < IDLE * SLICE:
                break
        return None

    def _env(self, way: str) -> dict[str, str | None]:
        # One thread, like torchrun for several ranks: then one fork server serves runs of one rank, too.
        return {
            **{name: None for name in os.environ if name.startswith(FOREIGN)},
            "TMPDIR": self._tmp,
            "PHALANX_HOME": self._homes.get(way, self.root),
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": f"{self.root}/inductor",  # otherwise every run would compile
        }

    def _outcome(self, kind: Kind, code: int, seconds: float) -> Outcome:
        streams = logs(self._logs, kind.ranks, kind.masks)
        found = files(f"{self.root}/{kind.name}", kind.ignore, kind.masks)
        return Outcome(code, streams, found | {"left in TMPDIR": leftovers(self._tmp)}, seconds)

    def _note(self, way: str, err: str) -> str:
        """Return errors of phalanx itself: no worker was started, or not in the requested way."""
        events = []
        for path in glob.glob(f"{self._logs}/*/events.jsonl"):
            with open(path) as lines:
                events = [json.loads(line) for line in lines]
        used = next((event["mode"] for event in events if event["event"] == "fork-server-ready"), None)
        if used is None:
            return f"no worker: {err.strip().rpartition(chr(10))[2]}"
        return "" if used == way else f"was {used}, not {way}"

    def warm_up(self) -> None:
        """Start the warm fork server, unless it is running."""
        if not self._warm:
            os.makedirs(self._tmp, exist_ok=True)
            made = phalanx("warm", "--for", "1h", env=self._env("warm"))
            assert made.code == 0, made.out + made.err
            self._warm = True


def _console(streams: Mapping[str, str], kind: Kind, out: str, err: str) -> dict[str, str]:
    """The output of each rank on the console must equal its log; otherwise it counts as a separate stream."""
    found = {}
    for rank in range(kind.ranks):
        for stream, text in (("stdout", out), ("stderr", err)):
            logged = streams[f"rank {rank} {stream}"].removesuffix("\n")
            seen = mask(shown(text, rank), kind.masks)
            if _comparable(logged) and seen != logged:
                found[f"rank {rank} {stream} on the console"] = seen
    return found


def _comparable(text: str) -> bool:
    return "\r" not in text and "\x1b" not in text and "\\x" not in text  # bars and bytes look different on the console
