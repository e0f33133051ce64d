"""Variables that a script sets before it imports torch take effect, however they are set."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.kit.cli import phalanx, python

pytestmark = pytest.mark.xdist_group("environment")

SEEN = """
import torch, torch.distributed as dist
print("seen", torch.get_num_threads(), dist.get_debug_level(), torch.jit._state._enabled.enabled,
      torch._logging._internal.log_state.log_qname_to_level)
"""
COMPILER = "\nimport torch._dynamo\nprint('seen', torch._dynamo.config.disable)\n"  # costs as much as torch itself
SET = {
    "in the text of the script and of a module": (
        "import os\nos.environ['PYTORCH_JIT'] = '0'\nos.environ.setdefault('TORCH_LOGS', 'dynamo')\nimport dotted\n"
        "os.putenv('OMP_NUM_THREADS', '5')\n"
    ),
    # The text does not show these: the first run must find them.
    "by loops, here and in a module": (
        "import os\nfor name in ['PYTORCH_JIT', 'TORCH_COMPILE_DISABLE']:\n"
        "  os.environ[name] = str(int(name[0] == 'T'))\nimport looped\n"
    ),
}


def write(folder: Path, text: str) -> None:
    (folder / "dotted.py").write_text("import os\nos.environ.update(TORCH_DISTRIBUTED_DEBUG='DETAIL')\n")
    (folder / "looped.py").write_text(
        "import os\nfor line in open('.env'):\n  name, value = line.strip().split('=')\n  os.environ[name] = value\n"
    )
    (folder / ".env").write_text("OMP_NUM_THREADS=7\nTORCH_DISTRIBUTED_DEBUG=INFO\n")
    (folder / "train.py").write_text(text + SEEN)


def seen(out: str) -> list[str]:
    return re.findall(r"seen .*", out)


@pytest.mark.parametrize("how", SET)
def test_the_value_counts_in_the_first_run_and_in_the_second(tmp_path: Path, how: str) -> None:
    write(tmp_path, SET[how])
    if "TORCH_COMPILE" in SET[how]:
        with open(tmp_path / "train.py", "a") as script:
            script.write(COMPILER)
    one = {"OMP_NUM_THREADS": "1"}  # like launchers
    expected = seen(python("train.py", cwd=str(tmp_path), env=one).out)
    assert len(expected) == 1 + ("TORCH_COMPILE" in SET[how])
    for _ in range(2):
        result = phalanx("run", "-g", "2", "--cpu", "train.py", cwd=str(tmp_path), env=one)
        assert sorted(seen(result.out)) == sorted(expected * 2), result.err
    # The first run has found what the text does not show.
    assert "imported with that" in result.err
    assert "fresh" not in result.err


def test_a_fresh_start_prints_once_and_keeps_the_probe_and_the_environment(tmp_path: Path) -> None:
    shown = "print('shown', '_phalanx_forkserver.probe.probe' in sys.modules, [n for n in os.environ if n in OURS])\n"
    write(tmp_path, "import sys\nprint('out')\nprint('err', file=sys.stderr)\nimport looped\nprint('more')\n")
    with open(tmp_path / "train.py", "a") as script:
        script.write(f"import os, sys\nOURS = ('PHALANX_PROBE', 'PHALANX_PYTHONPATH', 'PYTHONPATH')\n{shown}")
    result = phalanx("run", "-g", "2", "--cpu", "train.py", cwd=str(tmp_path))
    assert "starting it again as a fresh interpreter" in result.err
    for word in ("out", "more", "shown True []"):
        assert result.out.count(word) == 2, result.out
    assert len(re.findall(r"^(?:\[\d\] )?err$", result.err, re.MULTILINE)) == 2, result.err


def test_values_that_differ_between_ranks_get_an_interpreter_each(tmp_path: Path) -> None:
    write(tmp_path, "import os\nos.environ['TORCH_DISTRIBUTED_DEBUG'] = ['INFO', 'DETAIL'][int(os.environ['RANK'])]\n")
    for notice in ("starting it again as a fresh interpreter", "one interpreter per rank"):
        result = phalanx("run", "-g", "2", "--cpu", "train.py", cwd=str(tmp_path))
        assert sorted(line.split()[2] for line in seen(result.out)) == ["DebugLevel.DETAIL", "DebugLevel.INFO"]
        assert notice in result.err


def test_a_variable_that_is_set_after_torch_and_before_its_compiler_counts(tmp_path: Path) -> None:
    text = "import os, torch\nopt = torch.optim.SGD\nos.environ['TORCH_COMPILE_DISABLE'] = '1'\n"
    (tmp_path / "train.py").write_text(text + COMPILER)
    result = phalanx("run", "-g", "1", "--cpu", "train.py", cwd=str(tmp_path))
    assert seen(result.out) == ["seen True"]


def test_the_replacement_of_a_worker_starts_where_it_was(tmp_path: Path) -> None:
    write(
        tmp_path,
        "import os, signal, sys\nassert sys.argv[1:] == ['a b', ''], sys.argv\nstart = (os.getcwd(), os.getpid())\n"
        "print('start', *start, signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL, os.umask(0o22),"
        "'SET' in os.environ)\n"
        "os.chdir('/'); signal.signal(signal.SIGUSR1, signal.SIG_IGN); os.umask(0o77); os.environ['SET'] = '1'\n"
        "sys.path.insert(0, start[0])\nimport looped\n",
    )
    (tmp_path / "looped.py").write_text("import os\nfor name in ['OMP_NUM_THREADS']: os.environ[name] = '1'\n")
    result = phalanx("run", "-g", "1", "--cpu", "train.py", "a b", "", cwd=str(tmp_path))
    starts = re.findall(r"start .*", result.out)
    assert len(starts) == 1, starts  # twice, but the same: it is kept once
    assert "True 18 False" in starts[0]
    assert seen(result.out)[0].split()[1] == "1"  # some builds of torch use no more threads than there are cores
    assert result.code == 0


@pytest.mark.smoke
def test_a_module_of_the_scripts_own_is_never_executed_before_the_fork(tmp_path: Path) -> None:
    """torch imports glob, and would find this one."""
    (tmp_path / "glob.py").write_text("import os\nprint(__name__, os.environ['RANK'])\n")
    result = phalanx("run", "-g", "1", "--cpu", "glob.py", cwd=str(tmp_path))
    assert result.out == "__main__ 0\n"
    assert "glob.py has its name" in result.err
