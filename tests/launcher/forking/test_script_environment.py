"""Variables that a script sets before it imports torch, determined from its text."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.launcher.forking import script_environment

A = {"TORCH_LOGS": "a"}


@pytest.mark.parametrize(
    ("text", "before"),
    [
        ('import os\nos.environ["TORCH_LOGS"] = "a"\nimport torch', A),
        ('from os import environ\nenviron["TORCH_LOGS"] = "a"\nimport torch', A),
        ('import os\nos.environ.setdefault("TORCH_LOGS", "a")', A),
        ('import os\nos.environ.setdefault("OMP_NUM_THREADS", "a")', {}),  # it is set
        ('import os\nos.environ.update({"TORCH_LOGS": "a", "MINE": "b"})', A),
        ('import os\nos.environ.update(TORCH_LOGS="a", OMP_NUM_THREADS=str(4))', {**A, "OMP_NUM_THREADS": "4"}),
        ('import os\nos.environ |= {"TORCH_LOGS": "a"}', A),
        ('import os\nos.putenv("TORCH_LOGS", "a")', A),
        ('import os\ndel os.environ["OMP_NUM_THREADS"]', {"OMP_NUM_THREADS": None}),
        ('import os\nos.environ.pop("OMP_NUM_THREADS", None)', {"OMP_NUM_THREADS": None}),
        ('import os\nif "TORCH_LOGS" not in os.environ:\n  os.environ["TORCH_LOGS"] = "a"', A),
        ('import os\nif "OMP_NUM_THREADS" not in os.environ:\n  os.environ["OMP_NUM_THREADS"] = "a"', {}),
        ('import os\ntry:\n  os.environ["TORCH_LOGS"] = "a"\nexcept OSError:\n  pass', A),
        (
            'import os\ndef main():\n  os.environ["TORCH_LOGS"] = "a"\n  import torch\n'
            'if __name__ == "__main__":\n  main()',
            A,
        ),
        ('import os\nimport torch\nos.environ["TORCH_LOGS"] = "a"', {}),
        ('import os\nimport transformers\nos.environ["TORCH_LOGS"] = "a"', {}),
        ('import os, sys\nos.environ["TORCH_LOGS"] = sys.argv[1]', {}),
        ('import os\nos.environ["MINE"] = "a"\nimport torch', {}),  # no import reads it
        ('import os\nos.environ["TORCH_LOGS"] = "a"\nthis is no Python', {}),
        ("import local\nimport torch", {"OMP_NUM_THREADS": "7"}),
        ("from package.sub import x\nimport torch", {"TORCH_LOGS": "sub", "PYTORCH_JIT": "0"}),
        ("import torch\nimport local", {}),
    ],
)
def test_before_torch(tmp_path: Path, text: str, before: dict[str, str | None]) -> None:
    (tmp_path / "local.py").write_text('import os\nos.environ["OMP_NUM_THREADS"] = "7"\nimport train')
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text('import os\nos.environ["PYTORCH_JIT"] = "0"')
    (tmp_path / "package/sub.py").write_text('import os\nos.environ["TORCH_LOGS"] = "sub"\nx = 1')
    script = tmp_path / "train.py"
    script.write_text(text)
    found = script_environment.read(str(script), str(tmp_path), {"OMP_NUM_THREADS": "1"})
    assert found.before == before


def test_what_is_set_later_is_known_too(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, torch\ndef f():\n"
        '  os.environ["TORCHINDUCTOR_CACHE_DIR"] = "x"\n  os.environ["MINE"] = "y"\n'
        '  os.environ["PYTORCH_" + x] = "z"\n'
    )
    found = script_environment.read(str(script), str(tmp_path), {})
    assert found.later == {"TORCHINDUCTOR_CACHE_DIR"}
    assert found.before == {}


def test_a_script_that_cannot_be_read_sets_nothing(tmp_path: Path) -> None:
    assert script_environment.read(str(tmp_path / "no.py"), str(tmp_path), {}).before == {}
