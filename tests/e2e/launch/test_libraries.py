"""Scripts of other libraries, unchanged: Accelerate, Lightning and Transformers."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.cli import Env, phalanx, start, warm_environment

pytestmark = pytest.mark.xdist_group("libraries")  # they share imports

ROOT = Path(__file__).parents[3]
NEEDS = {"accelerate": "accelerate", "lightning": "lightning", "transformers": "transformers.trainer"}


@pytest.fixture(scope="module")
def places() -> Iterator[Env]:
    """Import each library once: Lightning takes three times as long as torch."""
    for name in NEEDS:
        assert importlib.util.find_spec(name), f"{name} is in the extra dev: make clean test"
    with warm_environment(*NEEDS.values()) as env:
        yield env


@pytest.mark.parametrize(
    ("name", "line", "least", "most"),
    [
        ("accelerate_digits", r"([\d.]+)% of 360 new digits", 88, 100),
        ("lightning_digits", r"([\d.]+)% of new digits", 88, 100),
        ("trainer_gpt", r"loss ([\d.]+) on new text", 0, 3),
    ],
)
def test_an_example(name: str, line: str, least: float, most: float, places: Env) -> None:
    text = (ROOT / "examples" / f"{name}.py").read_text()
    typed = re.search(rf"phalanx (run -g \d .*?examples/{name}\.py)", text)
    assert typed, "it says how to run it"
    *words, script = typed[1].split()
    result = phalanx(*words, "--cpu", script, timeout=150, cwd=str(ROOT), env=places)
    assert result.code == 0, result.out + result.err
    # Ranks and world as the library reports them, and a model that is the same on both although their data differs.
    found = re.findall(rf"rank (\d) of 2: {line}.* parameters have length ([\d.]+)", result.out)
    assert sorted(rank for rank, *_ in found) == ["0", "1"]
    ((score, _),) = {(score, length) for _, score, length in found}
    assert least < float(score) < most


def test_ported_scripts(tmp_path: Path, places: Env) -> None:
    """The scripts that docs/port.md compares phalanx with also learn."""
    jobs = {}
    for name in ("accelerate", "fabric"):
        (tmp_path / name).mkdir()
        words = ("run", "-g", "2", "--cpu", str(ROOT / "examples" / "port" / f"with_{name}.py"))
        jobs[name] = start(*words, cwd=str(tmp_path / name), env=places)
    for job in jobs.values():
        assert job.wait(120) == 0, job.out + job.err
        accuracies = [float(accuracy) for accuracy in re.findall(r"epoch \d: accuracy ([\d.]+)%, best", job.out)]
        assert len(accuracies) == 4
        assert accuracies[-1] > 85


def test_a_script_that_says_nothing_of_cpus(tmp_path: Path, places: Env) -> None:
    """Without a GPU, Accelerate uses other ranks only if a variable is set: --cpu sets it."""
    script = tmp_path / "bare.py"
    script.write_text(
        "from accelerate import Accelerator\n"
        "accelerator = Accelerator()\n"
        "print(f'rank {accelerator.process_index} of {accelerator.num_processes}')\n"
        "accelerator.wait_for_everyone()\n"  # gloo fails if one rank leaves while another still connects
        "accelerator.end_training()\n"
    )
    result = phalanx("run", "-g", "2", "--cpu", str(script), env=places)
    assert result.code == 0, result.out + result.err
    assert sorted(re.findall(r"rank (\d) of 2", result.out)) == ["0", "1"]
