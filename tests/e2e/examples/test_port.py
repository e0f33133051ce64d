"""docs/port.md: its diffs are those of the scripts, and the scripts do what it says."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
import torch

from tests.docs import blocks
from tests.kit import imported
from tests.kit.cli import phalanx, start

ROOT = Path(__file__).parents[3]
PORT = ROOT / "examples" / "port"
PAGE = (ROOT / "docs" / "port.md").read_text()
LINE = re.compile(r"epoch (\d): accuracy ([\d.]+)%, best ([\d.]+)%")
pytestmark = [pytest.mark.xdist_group("port"), pytest.mark.warmed, pytest.mark.imported]

# Runs a script whose rank 1 dies after step 30, once.
DEADLY = """
import os, runpy, signal, sys
from phalanx.train.run import Run

step = Run.step

def dies(run, *args, **options):
    update = step(run, *args, **options)
    if (run.steps, run.rank, run.group.generation) == (30, 1, 0) and run._resumed is None:
        os.kill(os.getpid(), signal.SIGKILL)
    return update

Run.step = dies
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def diff(name: str) -> list[str]:
    return blocks.diff(PORT / "plain.py", PORT / f"with_{name}.py").splitlines()


@pytest.mark.parametrize("name", ["phalanx", "accelerate", "fabric"])
def test_the_page_shows_the_diffs(name: str) -> None:
    assert "```diff\n" + "\n".join(diff(name)) + "\n```" in PAGE
    out, into = (sum(line.startswith(sign) for line in diff(name)[2:]) for sign in "-+")
    assert f"examples/port/with_{name}.py) | {out} | {into} |" in PAGE
    ours = [sum(line.startswith(sign) for line in diff("phalanx")[2:]) for sign in "-+"]
    assert ours[0] <= out
    assert ours[1] <= into
    for path in ("README.md", "CHANGELOG.md"):
        assert f"{ours[0]} lines removed and {ours[1]} added" in (ROOT / path).read_text()
    for path in ("README.md", "CHANGELOG.md"):
        plain = len((PORT / "plain.py").read_text().splitlines())
        assert f"plain script of {plain} lines" in (ROOT / path).read_text()


def test_ported_it_survives_and_resumes(tmp_path: Path) -> None:
    """Rank 1 is killed, then the whole run; it is resumed with one more rank. The best value is never lost."""
    deadly = tmp_path / "deadly.py"
    deadly.write_text(DEADLY)
    words = ("--cpu", "--checkpoints", "kept", "--checkpoint-every", "10", str(deadly), str(PORT / "with_phalanx.py"))
    job = start("run", "-g", "2", *words, cwd=str(tmp_path))
    job.wait_for("epoch 2: accuracy")
    job.signal(signal.SIGKILL)
    job.wait()
    assert "rank 1 failed: SIGKILL (Killed); regrouped" in job.err
    assert "no step lost" in job.err
    resumed = phalanx("run", "-g", "3", *words, cwd=str(tmp_path))
    assert resumed.code == 0, resumed.out + resumed.err
    assert re.search(r"resumed at step \d+, epoch [123]", resumed.out)
    seen: dict[int, float] = {}
    for epoch, accuracy, shown in LINE.findall(job.out + resumed.out):
        # An epoch is repeated, with another number of ranks, if no later checkpoint was complete.
        best = max((value for before, value in seen.items() if before < int(epoch)), default=0.0)
        seen[int(epoch)] = float(accuracy)
        assert float(shown) >= best - 0.3, (epoch, shown)  # one picture
    assert sorted(seen) == [0, 1, 2, 3]
    assert max(seen.values()) > 85
    assert (tmp_path / "model.pt").exists()


def test_recovered_it_has_the_parameters_of_an_undisturbed_run(tmp_path: Path) -> None:
    deadly = tmp_path / "deadly.py"
    deadly.write_text(DEADLY)
    trained = []
    for name, words in (("whole", ()), ("killed", (str(deadly),))):
        (tmp_path / name).mkdir()
        script = (*words, str(PORT / "with_phalanx.py"))
        done = phalanx("run", "-g", "2", "--cpu", *script, cwd=str(tmp_path / name))
        assert done.code == 0, done.out + done.err
        assert ("rank 1 failed: SIGKILL" in done.err) is (name == "killed")
        trained.append((LINE.findall(done.out), torch.load(tmp_path / name / "model.pt", weights_only=True)))
    (lines, whole), (again, recovered) = trained
    assert again == lines
    assert whole.keys() == recovered.keys()
    assert all(torch.equal(whole[key], recovered[key]) for key in whole)


def test_the_plain_script(tmp_path: Path) -> None:
    done = imported.python(str(PORT / "plain.py"), cwd=str(tmp_path))
    assert done.code == 0, done.err
    assert [int(epoch) for epoch, _, _ in LINE.findall(done.out)] == [0, 1, 2, 3]
