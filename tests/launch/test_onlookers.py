"""When there is a page, and what is said about it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.launch.onlookers import Onlookers
from phalanx.launch.plan import Watching
from phalanx.watch.page.place import Place

SEVERAL = SimpleNamespace(names=("gpu7", "gpu8"))
LINK = "http://127.0.0.1:29580/#KEY"


def onlookers(
    watching: Watching, *, terminal: bool = True, quiet: bool = False, gathering: Any = None, ssh: bool = False
) -> Onlookers:
    plan: Any = SimpleNamespace(
        watching=watching,
        showing=SimpleNamespace(quiet=quiet),
        gathering=gathering,
        environ={"SSH_CONNECTION": "10.0.0.1 1 10.0.0.2 22"} if ssh else {},
    )
    console: Any = SimpleNamespace(terminal=lambda _: terminal)
    folder: Any = SimpleNamespace(path="/nowhere", name="run")
    return Onlookers(plan, folder, console)


@pytest.mark.parametrize(
    ("watching", "around", "wanted"),
    [
        (Watching(), {}, True),  # somebody sits there
        (Watching(), {"terminal": False}, False),
        (Watching(), {"quiet": True}, False),
        (Watching(), {"gathering": SEVERAL}, False),
        (Watching(screen=True), {}, False),
        (Watching(page=False), {}, False),
        (Watching(page=True), {"terminal": False, "quiet": True, "gathering": SEVERAL}, True),
    ],
)
def test_when_there_is_a_page(watching: Watching, around: dict[str, Any], wanted: bool) -> None:
    assert onlookers(watching, **around)._wanted is wanted


def test_how_to_get_there() -> None:
    def said(place: Place, **around: Any) -> str:
        return onlookers(Watching(page=True), **around)._announcement(place, LINK, 29580)

    assert said(Place()) == f"see {LINK}"
    assert said(Place(), gathering=SEVERAL) == f"see {LINK}"
    far = said(Place(), gathering=SEVERAL, ssh=True)
    assert far.splitlines() == [
        f"see {LINK}",
        "  from your own machine, after: ssh -N -L 29580:127.0.0.1:29580 gpu7",
    ]
    here = said(Place(), gathering=SimpleNamespace(names=("localhost", "gpu8")), ssh=True)
    assert here.endswith(f"@{os.uname().nodename}")  # what it is called here would lead elsewhere from there
    assert "plain http" in said(Place("0.0.0.0"), ssh=True)
