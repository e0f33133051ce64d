"""Modules that are imported before the fork: hidden until they are imported, and checked then."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.e2e.places import SCRIPTS as E2E
from tests.kit.cli import phalanx, run

SCRIPTS = Path(E2E).parents[1] / "launcher/scripts"

# Recorded, but their values are not stored.
NOT_KEPT = {"LNAME", "LOGNAME", "PYTHONUSERBASE", "TEMP", "TMP", "TMPDIR", "USER", "USERNAME", "_PYTHON_PROJECT_BASE"}


@pytest.mark.extended
def test_a_change_of_any_variable_that_the_import_of_torch_reads_is_noticed(tmp_path: Path) -> None:
    """Determined by observation: calls of getenv in native code, and reads of os.environ in Python."""
    shim = tmp_path / "getenv.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", shim, SCRIPTS / "getenv.c"], check=True)
    log = str(tmp_path / "log")
    result = run(
        (sys.executable, str(SCRIPTS / "reads.py"), log), env={"LD_PRELOAD": str(shim), "ENVLOG": log}, timeout=120
    )
    found = json.loads(result.out)
    assert found["read"] > 300
    assert found["unnoticed"].keys() <= NOT_KEPT


def test_the_modules_reappear_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(
        "import os\nVALUE = os.environ.get('LATE')\nos.environ['WRITTEN'] = 'by import'\n"
    )
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/__init__.py").write_text(
        "import late, json\n__import__('late', fromlist=['VALUE'])  # as libraries do\n"
    )
    (tmp_path / "pack/part.py").write_text("import atexit\natexit.register(print, 'part at exit')\n")
    (tmp_path / "test.py").write_text(
        textwrap.dedent("""
        import atexit, importlib.util, os, sys
        from phalanx.forkserver.imports import preloaded
        before = set(sys.modules)
        modules = preloaded.Preloaded()
        modules.load("pack")
        modules.load("pack.part")
        pack, spec = sys.modules["pack"], sys.modules["pack"].__spec__
        os.environ.pop("WRITTEN")
        stale = []
        modules.hide()
        modules.begin(frozenset(), stale.append)
        assert set(sys.modules) == before, set(sys.modules) - before
        assert importlib.util.find_spec("pack").origin == spec.origin
        assert "pack" not in sys.modules
        atexit.register(print, "mine at exit")
        import pack as again
        assert again is pack and again.__spec__ is spec
        assert "late" in sys.modules and "json" in sys.modules and "pack.part" not in sys.modules
        assert not hasattr(pack, "part")
        assert os.environ["WRITTEN"] == "by import"
        assert not stale
        os.environ["LATE"] = "now"
        import pack.part
        assert pack.part and not stale  # part does not read it
        assert modules not in sys.meta_path
        print("done")
        """)
    )
    result = run((sys.executable, str(tmp_path / "test.py")), cwd=str(tmp_path))
    # Functions that an import registers are called in the order of imports in the script, not before the fork.
    assert result.out.split("\n") == ["done", "part at exit", "mine at exit", ""], result.err


def test_a_variable_that_an_import_has_read_and_the_script_has_set_since_is_stale(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text("import os\nVALUE = os.environ.get('LATE')\n")
    (tmp_path / "test.py").write_text(
        textwrap.dedent("""
        import os, sys
        from phalanx.forkserver.imports import preloaded
        modules = preloaded.Preloaded()
        os.environ["ASSUMED"] = "1"
        modules.load("late")
        os.environ["RANK"] = "3"  # the launcher's
        stale = []
        modules.hide()
        modules.begin(frozenset(), stale.append)
        os.environ["RANK"] = "4"
        os.environ["LATE"] = "now"
        os.putenv("OMP_NUM_THREADS", "5")
        import late
        print(stale)
        """)
    )
    result = run((sys.executable, str(tmp_path / "test.py")), cwd=str(tmp_path), env={"OMP_NUM_THREADS": None})
    assert result.out.strip() == "[{'LATE': 'now', 'OMP_NUM_THREADS': '5'}]", result.err


def test_code_before_the_script_finds_hidden_modules_and_waits_for_their_import(tmp_path: Path) -> None:
    (tmp_path / "inner.py").write_text("VALUE = 1\n")
    (tmp_path / "outer.py").write_text("import inner\n")
    (tmp_path / "gone.py").write_text("")
    (tmp_path / "test.py").write_text(
        textwrap.dedent("""
        import sys
        from phalanx.forkserver import hidden_modules
        from phalanx.forkserver.imports import preloaded
        modules = preloaded.Preloaded()
        modules.load("outer")
        modules.load("gone")
        modules.hide()
        assert hidden_modules.find("inner").VALUE == 1 and "inner" not in sys.modules
        assert hidden_modules.find("sys") is sys and hidden_modules.find("nothing") is None
        assert modules.loaded("inner") and not modules.loaded("sys")
        hidden_modules.when_imported("inner", lambda: print("inner is imported:", "inner" in sys.modules))
        hidden_modules.when_imported("gone", lambda: print("never"))
        first = hidden_modules.find("gone")
        modules.forget("gone")
        import gone
        assert gone is not first
        print("outer")
        import outer  # imports inner
        import inner
        assert hidden_modules.find("inner") is inner and not hidden_modules.modules
        """)
    )
    result = run((sys.executable, str(tmp_path / "test.py")), cwd=str(tmp_path))
    assert (result.out, result.err) == ("outer\ninner is imported: True\n", "")


TRAINING = """\
import sys
import torch
import phalanx

def main(run):
    model = torch.nn.Linear(4, 4)
    opt = torch.optim.SGD(model.parameters())
    data = run.loader(torch.utils.data.TensorDataset(torch.randn(8, 4)), batch_size=2)
    run.keep(model, opt, data)
    wrapped = run.wrap(model)
    for (x,) in run.batches(data):
        run.backward(wrapped(x).sum())
        run.step(opt)
    preloaded = sys.modules["_phalanx_forkserver.imports.preload"].modules
    print([name for name in sys.modules if name.startswith("phalanx.") and not preloaded.loaded(name)])

phalanx.main(main)
"""


@pytest.mark.parametrize("server", ["cold", pytest.param("warm", marks=pytest.mark.warmed)])
def test_a_fork_server_imports_every_module_of_phalanx_that_a_training_uses(server: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    result = phalanx("run", "-g", "2", "--cpu", str(tmp_path / "train.py"))
    assert sorted(line for line in result.out.splitlines() if line.endswith("]")) == ["[0] []", "[1] []"], server
