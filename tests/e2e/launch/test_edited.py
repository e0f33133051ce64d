"""Files that are edited, broken or deleted during a run: ranks that start later run the original version."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.cli import Result, phalanx

SURVIVE = """
import os, sys, torch, phalanx
import helper
from pkg.deep import LEAF

MINE = "old script"

def change():
    with open("train.py") as file:
        text = file.read()
    with open("train.py", "w") as file:
        file.write(text.replace("old script", "new script"))
    with open("helper.py", "w") as file:
        file.write("this is broken")
    os.unlink("pkg/leaf.py")

def train(run):
    model = torch.nn.Linear(4, 4)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    data = run.loader(torch.utils.data.TensorDataset(torch.randn(40, 4)), batch_size=2, shuffle=True)
    run.keep(model, opt, data)
    net = run.wrap(model)
    print("rank", run.rank, run.group.generation, MINE, helper.MINE, LEAF, __name__, flush=True)
    for _ in run.epochs(1):
        for (x,) in run.batches(data):
            loss = net(x).mean()
            run.backward(loss)
            run.step(opt, loss=loss)
            run.group.barrier()
            if run.group.is_main and run.steps == 3 and not run.group.generation:
                change()
            run.group.barrier()
            if run.rank == 1 and run.steps == 5 and not run.group.generation:
                os.kill(os.getpid(), 9)

if __name__ == "__main__":
    phalanx.main(train)
    print("end of", MINE, sys.argv[1:], __file__, flush=True)
"""
RESTART = """
import os, sys
import helper

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("attempt", attempt, helper.MINE, sys.argv, os.path.basename(__file__), sys.path[0], flush=True)
if attempt == 0:
    os.unlink("helper.py")
    os.unlink("train.py")
    sys.exit(5)
raise ValueError("of the old script")
"""


def written(folder: Path, script: str) -> None:
    (folder / "pkg").mkdir()
    for name, text in {
        "train.py": script,
        "helper.py": 'MINE = "old helper"\n',
        "pkg/__init__.py": "",
        "pkg/deep.py": "from .leaf import LEAF\n",
        "pkg/leaf.py": 'LEAF = "old leaf"\n',
    }.items():
        (folder / name).write_text(text)


@pytest.mark.parametrize("way", ["cold", pytest.param("warm", marks=[pytest.mark.warmed, pytest.mark.smoke])])
def test_a_replacement_runs_what_the_run_began_with(way: str, tmp_path: Path) -> None:
    written(tmp_path, SURVIVE)
    options = ["--no-warm"] if way == "cold" else []
    done = phalanx("run", "-g", "2", "--cpu", *options, "train.py", "a", timeout=120, cwd=str(tmp_path))
    assert done.code == 0, done.err
    assert "new" not in done.out
    for rank, generation in ((0, 0), (1, 0), (0, 1), (1, 1)):
        assert f"rank {rank} {generation} old script old helper old leaf __main__" in done.out
    assert done.out.count(f"end of old script ['a'] {tmp_path}/train.py") == 2
    warning = "train.py, helper.py, pkg/leaf.py have changed on the disk since the run began"
    assert done.err.count(warning) == 1
    assert "new script" in (tmp_path / "train.py").read_text()


def restarted(folder: Path, *options: str) -> Result:
    written(folder, RESTART)
    return phalanx("run", "--cpu", "--max-restarts", "1", *options, "train.py", "a", timeout=120, cwd=str(folder))


@pytest.mark.parametrize("options", [("--fresh",), pytest.param((), marks=pytest.mark.warmed)], ids=["fresh", "warm"])
def test_a_deleted_script_restarts_and_fails_as_itself(options: tuple[str, ...], tmp_path: Path) -> None:
    done = restarted(tmp_path, *options)
    assert done.code == 1
    assert f"attempt 1 old helper ['train.py', 'a'] train.py {tmp_path}" in done.out
    assert f'File "{tmp_path}/train.py", line 11, in <module>\nValueError: of the old script\n' in done.err
    assert "kept_sources" not in done.err
    assert "train.py, helper.py have changed on the disk" in done.err
