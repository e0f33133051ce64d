"""Disks that are full, read-only or out of inodes, on real mounts in a namespace that ends with the test."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from tests.kit.cli import PHALANX, Result, run

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root"),
    pytest.mark.leaves("tmp:phalanx-*", why="runs that found no room in PHALANX_HOME are kept there"),
]

FILL = """
def fill(folder):
    with open(folder + "/ballast", "ab", buffering=0) as file:
        for size in (4096, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                pass
"""
TRAIN = f"""
import os, sys, torch, phalanx
{FILL}
disk, at, die = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def train(run):
    model = torch.nn.Linear(300, 300)
    opt = torch.optim.AdamW(model.parameters())
    data = run.loader(torch.utils.data.TensorDataset(torch.randn(320, 300)), batch_size=2, shuffle=True)
    run.keep(model, opt, data)
    ddp = run.wrap(model)
    for _ in run.epochs(1):
        for (x,) in run.batches(data):
            loss = ddp(x).pow(2).mean()
            run.backward(loss)
            run.step(opt, loss=loss)
            with open("commits." + str(run.rank), "a") as file:
                file.write(str(run.steps) + "\\n")
            run.group.barrier()
            if run.group.is_main and run.steps == at:
                fill(disk)
            run.group.barrier()
            if run.rank == 1 and run.group.generation == 0 and run.steps == die:
                os.kill(os.getpid(), 9)

phalanx.main(train)
"""
RESTART = f"""
import os, sys
{FILL}
disk, how = sys.argv[1:]
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if first and os.environ["RANK"] == "0":
    if how == "full":
        fill(disk)
    number = 0
    while how == "inodes":
        try:
            open(f"{{disk}}/{{number}}", "w").close()
            number += 1
        except OSError:
            break
    sys.exit(5)
if first:
    import time
    time.sleep(60)
print("restarted", os.environ["RANK"])
"""


def mounted(options: str, disk: Path, *words: str, then: str = "true", home: str = "") -> Result:
    """Run the command with a separate file system at `disk`."""
    disk.mkdir(exist_ok=True)
    mount = f"mount -t tmpfs -o {options} none {shlex.quote(str(disk))}"
    command = f"{mount} && {{ {then}; }} && exec {shlex.join([*PHALANX, *words])}"
    env = {"PHALANX_HOME": home} if home else {}
    return run(("unshare", "-m", "sh", "-c", command), timeout=120, cwd=str(disk.parent), env=env)


def commits(folder: Path, rank: int) -> list[int]:
    return [int(line) for line in (folder / f"commits.{rank}").read_text().split()]


def test_a_disk_that_fills_up_costs_checkpoints_and_no_step(tmp_path: Path) -> None:
    """Full before a checkpoint, a death and the last checkpoint: each step is committed once, and nothing is retried,
    although restarts are allowed. The last step is always saved if possible.
    """
    (tmp_path / "train.py").write_text(TRAIN)
    disk = tmp_path / "disk"
    words = ("run", "-g", "2", "--cpu", "--max-restarts", "5", "--checkpoints", f"{disk}/kept")
    done = mounted("size=20m", disk, *words, "--checkpoint-every", "15", "train.py", str(disk), "25", "35")
    assert done.code == 1, done.err
    assert [commits(tmp_path, rank) for rank in (0, 1)] == [list(range(1, 81))] * 2
    output = done.out + done.err
    assert "phalanx: the checkpoint of step 45 was not written\n" in output
    assert "rank 0: No space left on device" in output
    assert "the checkpoint of step 60 was not written either: No space left on device" in output
    assert "the training is complete, but its last checkpoint was not written (step 80)" in done.err
    assert "the newest checkpoint is that of step 15" in done.err
    assert "not retrying: the training is complete" in done.err
    assert "regrouped, and step 36 was committed" in done.err
    assert "done again" not in output


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("options", "then", "why"),
    [
        ("size=10m,ro", "true", "Read-only file system"),
        ("size=64k", "head -c 100000 /dev/zero > disk/x || true", "No space left on device"),
        ("size=8k", "true", "No space left on device"),
        ("size=10m,nr_inodes=2", "touch disk/x", "No space left on device"),
    ],
    ids=["read-only", "full", "nearly full", "inodes"],
)
def test_a_run_starts_without_its_folder(options: str, then: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text("print('hello')\n")
    disk = tmp_path / "disk"
    done = mounted(options, disk, "run", "-g", "2", "--cpu", "--fresh", "hello.py", then=then, home=f"{disk}/home")
    assert done.code == 0, done.err
    assert done.out.count("hello") == 2
    assert f"{disk}/home cannot be written: {why}. Runs are kept in " in done.err


@pytest.mark.parametrize("how", ["full", "inodes"])
def test_a_restart_without_room_for_its_logs(how: str, tmp_path: Path) -> None:
    (tmp_path / "restart.py").write_text(RESTART)
    disk = tmp_path / "disk"
    words = ("run", "-g", "2", "--cpu", "--fresh", "--max-restarts", "1", "restart.py", str(disk), how)
    done = mounted("size=10m,nr_inodes=40", disk, *words, home=f"{disk}/home")
    assert done.code == 0, done.err
    assert done.out.count("restarted") == 2
    assert "The run continues" in done.err
