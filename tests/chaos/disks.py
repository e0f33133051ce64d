"""A disk that is full when checkpoints are due: on a file system in a mount namespace that ends with the run."""

from __future__ import annotations

import json
import re
import shlex

from tests.chaos import oracle
from tests.chaos.campaign import Round, RoundResult
from tests.chaos.placed import Fault, judged, needed
from tests.kit.cli import PHALANX, run

SAVE_EVERY = 3  # steps
NOT_WRITTEN = "No space left on device"


def full(this: Round) -> RoundResult:
    """The disk fills up before checkpoints are due, and has free space again later. The last time it may stay full:
    then the last checkpoint replaces an older one, or cannot be written, which the exit code shows. No step is lost or
    repeated.
    """
    faults: list[Fault] = []
    step, freed = 1, True
    for number in range(this.faults):
        step += this.chance.randrange(1, 4)
        faults.append([step, 0, "fill"])
        freed = number + 1 < this.faults or this.chance.random() < 0.5
        step += this.chance.randrange(SAVE_EVERY, 3 * SAVE_EVERY)
        if freed:
            faults.append([step, 0, "free"])
    epochs = needed(faults)
    disk = this.folder / "disk"
    disk.mkdir()
    kept = ("--checkpoints", str(disk / "kept"), "--checkpoint-every", str(SAVE_EVERY))
    words = (*PHALANX, "run", "-g", "2", "--cpu", *kept, oracle.SCRIPT, str(this.folder), json.dumps(faults))
    # The disk is gone after that: its checkpoints are listed elsewhere.
    listed = f"ls {shlex.quote(str(disk / 'kept'))} > {shlex.quote(str(this.folder / 'saved'))}"
    command = f"{shlex.join(words)}; code=$?; {listed}; exit $code"
    mount = f"mount -t tmpfs -o size=1m none {shlex.quote(str(disk))} && {{ {command}; }}"
    env = {"EPOCHS": str(epochs), "DISK": str(disk)}
    done = run(("unshare", "-m", "sh", "-c", mount), timeout=oracle.LONG, env=env)
    output = done.out + done.err
    assert NOT_WRITTEN in output, output
    # A save that was still running may have replaced an older checkpoint, and so left room for the last one.
    complete = f"step-{epochs * oracle.EPOCH:012d}" in (this.folder / "saved").read_text().split()
    assert complete or not freed, output
    assert complete != ("the training is complete, but its last checkpoint was not written" in output), output
    commits = [(commit.rank, commit.step) for commit in oracle.read(this.folder)[1]]
    assert sorted(commits) == [(rank, step + 1) for rank in range(2) for step in range(epochs * oracle.EPOCH)]
    assert not re.search("done again", output), output
    # The script counts freeing the disk as a fault, too.
    counted = Round(this.chance, len(faults), this.folder, this.env)
    result = judged(counted, done, 2, epochs, code=0 if complete else 1, regroup=False)
    seconds = [took for fault, took in zip(faults, result.seconds, strict=True) if fault[2] == "fill"]
    return RoundResult(this.faults, this.faults, seconds)
