"""phalanx.spawn with ranks that are not forks of the caller: they import its script."""

from __future__ import annotations

import multiprocessing
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from phalanx.errors import UsageError
from phalanx.launcher.spawn import spawn as module
from tests.kit.cli import python

spawn = partial(module.spawn, join=False)
NO_TORCH = "import sys; sys.modules['torch'] = None\n"


def test_fresh_ranks_import_the_script(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        f"{NO_TORCH}import os, sys\n"
        "from phalanx.launcher.spawn.spawn import spawn\n"
        "class Answer:\n"
        "    def __init__(self, rank): self.rank = rank\n"
        "def fn(x): return Answer(x * int(os.environ['RANK'])), 'mark' in os.environ, os.getppid()\n"
        "if __name__ == '__main__':\n"
        "    found = spawn(fn, 2, args=(3,), fresh=True, join=False)\n"
        "    print([answer.rank for answer, _, _ in found], found[0][2] != os.getpid())\n"
    )
    result = python(str(path))
    assert (result.code, result.out) == (0, "[0, 3] True\n"), result.err


def forked() -> bool:
    return _forked


_forked = False


@pytest.mark.extended
def test_where_cuda_is_up_ranks_are_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as it can be tested without a GPU; with one: gpu_spawn.py."""
    monkeypatch.setattr(sys.modules[__name__], "_forked", True)
    assert spawn(forked, 1) == [True]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert module.must_not_fork() == "CUDA is already initialized in it"
    assert spawn(forked, 2) == [False, False]
    monkeypatch.undo()
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    assert module.must_not_fork().startswith("it is a daemon of multiprocessing")
    local = 5
    with pytest.raises(UsageError, match="cannot be sent to the ranks") as caught:
        spawn(lambda: local, 2)
    assert "they cannot be forks of this process: it is a daemon of multiprocessing" in str(caught.value)


def test_fresh_ranks_cannot_import_what_was_typed() -> None:
    text = f"{NO_TORCH}from phalanx.launcher.spawn.spawn import spawn\ndef fn(): return 7\n"
    forked = python("-", input=f"{text}print(spawn(fn, 2, join=False))")
    assert forked.out == "[7, 7]\n", forked.err
    fresh = python(
        "-", input=f"import sys; sys.modules['cloudpickle'] = None\n{text}spawn(fn, 2, fresh=True, join=False)"
    )
    assert fresh.code == 1
    assert "which is not a file here" in fresh.err
    assert "pip install cloudpickle" in fresh.err


def test_a_script_that_spawns_while_it_is_imported(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("from phalanx.launcher.spawn.spawn import spawn\ndef fn(): pass\nspawn(fn, 2, fresh=True)\n")
    result = python(str(path))
    assert result.code == 1
    assert 'put the call under `if __name__ == "__main__":`' in result.err


def test_an_error_in_a_fresh_rank(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        f"{NO_TORCH}from phalanx.launcher.spawn.spawn import spawn\n"
        "def fn(): raise KeyError('nothing there')\n"
        "if __name__ == '__main__': spawn(fn, 1, fresh=True, join=False)\n"
    )
    result = python(str(path))
    assert result.code == 1
    assert re.search(r"rank 0 of 1: KeyError: 'nothing there'", result.err)
