"""Messages between ranks in shared memory: all arrive, and a rank that dies is named."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("phalanx.collectives._native")

from tests.collectives.messages import SCENES

ROOT = Path(__file__).parents[2]


@functools.cache
def report() -> dict[str, str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.collectives.messages"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=350)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.xdist_group("p2p")
@pytest.mark.parametrize("way", ["direct", "staged"])
@pytest.mark.parametrize("scene", list(SCENES))
def test_scene(scene: str, way: str) -> None:
    assert report()[f"{scene} {way}"] == ""


def _built(program: Path, *flags: str) -> Path:
    native = ROOT / "src/phalanx/collectives/native"
    sources = [one for one in native.glob("*.c") if one.name != "binding.c"]
    test = Path(__file__).parent / "native/p2p_test.c"
    common = ["-std=gnu11", "-g", "-O1", "-pthread", f"-I{native}", "-Wl,--wrap=mmap,--wrap=munmap"]
    subprocess.run(["gcc", *common, *flags, test, *sources, "-o", program], check=True, timeout=350)
    return program


@pytest.mark.extended
@pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc")
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_sanitizers(sanitizer: str, tmp_path: Path) -> None:
    """Ranks are threads of one program, whose memory a sanitizer watches."""
    program = _built(tmp_path / "p2p", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
    done = subprocess.run([program], capture_output=True, text=True, timeout=350)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-4000:]


@pytest.mark.extended
@pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc")
def test_deaths(tmp_path: Path) -> None:
    """A rank dies before and after each action for a message: the other rank gets an error, or the message."""
    program = _built(tmp_path / "p2p", "-DPHX_FAULTS")
    done = subprocess.run([program, "deaths"], capture_output=True, text=True, timeout=350)
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout.split()[0]) > 50, done.stdout
