"""The cells of a notebook have the same names as in the notebook."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from phalanx.launcher.spawn import cells

FILE = "/tmp/ipykernel_31283/1096529376.py"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (f"{FILE}:3 in bad", "Cell In[4]:3 in bad"),
        (
            "rank 1 is sleeping at 1096529376.py:3 in hang; rank 0 at t.py:5",
            "rank 1 is sleeping at Cell In[4]:3 in hang; rank 0 at t.py:5",
        ),
        ("    return run.rnak", "    return run.rnak"),
        ("ratio 3:2 of http://h:80/x", "ratio 3:2 of http://h:80/x"),
    ],
)
def test_a_cell_has_its_number(text: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = SimpleNamespace(compile=SimpleNamespace(_filename_map={FILE: 4}))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert cells.named(text) == named


@pytest.mark.parametrize("ipython", [None, SimpleNamespace(get_ipython=lambda: None)], ids=["none", "no shell"])
def test_outside_of_notebooks_nothing_changes(ipython: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert cells.named(f"{FILE}:3 in bad") == f"{FILE}:3 in bad"
