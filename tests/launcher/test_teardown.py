"""Objects that a worker does not destroy at exit, and those that it finalizes as usual."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.cli import phalanx, python

SCRIPT = """
import weakref
import torch

before = [info for info in weakref.finalize._registry.values() if info.func is torch.library._del_library]
print("torch's own:", len(before) > 100, sum(info.atexit for info in before))
mine = torch.library.Library("of_a_test", "DEF")
mine.define("op(Tensor x) -> Tensor")
(own,) = [info for info in weakref.finalize._registry.values() if info.args and info.args[-2] is mine.m]
print("the script's:", own.atexit)
"""

HANGS_ON = """
import os
import torch
import torch.nn.functional


class Loud:
    def __init__(self, name):
        self.name = name

    def __del__(self, write=os.write):
        write(1, f"gone: {self.name}\\n".encode())


torch.kept = Loud("in a module")
torch.nn.functional.kept = {"deep": [Loud("deeper in another")]}
"""


@pytest.mark.extended
def test_operators_of_torch_stay_and_those_of_a_script_do_not(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(SCRIPT)
    done = phalanx("run", "-g", "1", "--cpu", "--quiet", str(script))
    assert (done.code, done.out) == (0, "torch's own: True 0\nthe script's: True\n"), done.err


@pytest.mark.extended
def test_destructors_of_what_a_script_hangs_on_imported_modules_are_called(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(HANGS_ON)
    done = phalanx("run", "-g", "1", "--cpu", "--quiet", str(script))
    alone = python(str(script))
    assert sorted(done.out.splitlines()) == sorted(alone.out.splitlines())
    assert len(done.out.splitlines()) == 2
