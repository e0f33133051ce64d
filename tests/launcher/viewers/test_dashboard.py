"""When there is a page, and the messages about it."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.launcher.options import ViewerOptions
from phalanx.launcher.viewers.dashboard import Dashboard
from phalanx.watch.page.address import PageAddress

SEVERAL = SimpleNamespace(names=("gpu7", "gpu8"))
LINK = "http://127.0.0.1:29580/#KEY"


def dashboard(
    viewers: ViewerOptions, *, terminal: bool = True, quiet: bool = False, gathering: Any = None, ssh: bool = False
) -> Dashboard:
    plan: Any = SimpleNamespace(
        viewers=viewers,
        output=SimpleNamespace(quiet=quiet),
        rendezvous=gathering,
        environ={"SSH_CONNECTION": "10.0.0.1 1 10.0.0.2 22"} if ssh else {},
    )
    console: Any = SimpleNamespace(terminal=lambda _: terminal)
    folder: Any = SimpleNamespace(path="/nowhere", name="run")
    return Dashboard(plan, folder, console)


@pytest.mark.parametrize(
    ("viewers", "around", "wanted"),
    [
        (ViewerOptions(), {}, True),  # a terminal
        (ViewerOptions(), {"terminal": False}, False),
        (ViewerOptions(), {"quiet": True}, False),
        (ViewerOptions(), {"gathering": SEVERAL}, False),
        (ViewerOptions(screen=True), {}, False),
        (ViewerOptions(page=False), {}, False),
        (ViewerOptions(page=True), {"terminal": False, "quiet": True, "gathering": SEVERAL}, True),
    ],
)
def test_when_there_is_a_page(viewers: ViewerOptions, around: dict[str, Any], wanted: bool) -> None:
    assert dashboard(viewers, **around)._wanted is wanted


def test_the_announcement_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    def notice(place: PageAddress, **around: Any) -> str:
        bound = (place.host, 29580, 0, 0)[: 4 if ":" in place.host else 2]
        return dashboard(ViewerOptions(page=True), **around)._announcement(place, LINK, bound)

    assert notice(PageAddress()) == f"see {LINK}"
    assert notice(PageAddress(), gathering=SEVERAL) == f"see {LINK}"
    far = notice(PageAddress(), gathering=SEVERAL, ssh=True)
    assert far.splitlines() == [
        f"see {LINK}",
        "  from your own computer, after: ssh -N -L 29580:127.0.0.1:29580 gpu7",
    ]
    here = notice(PageAddress(), gathering=SimpleNamespace(names=("localhost", "gpu8")), ssh=True)
    assert here.endswith(f"@{os.uname().nodename}")  # the local name would refer to another host there
    assert "plain http" in notice(PageAddress("0.0.0.0"), ssh=True)
    assert " 29580:[::1]:29580 " in notice(PageAddress("::1"), ssh=True)

    def nobody(_: int) -> None:
        raise KeyError("getpwuid(): uid not found: 4242")

    monkeypatch.setattr("pwd.getpwuid", nobody)  # a container without an entry for us
    assert notice(PageAddress(), ssh=True).endswith(f" {os.uname().nodename}")


def test_a_full_disk() -> None:
    async def work() -> list[str]:
        messages: list[str] = []
        looks = dashboard(ViewerOptions(page=True))
        looks._console = SimpleNamespace(say=messages.append)  # type: ignore[assignment]
        looks.start(leads=True)  # /nowhere is not a folder
        assert looks._listener is None  # nothing would ever answer
        return messages

    (message,) = asyncio.run(work())
    assert "the page is not available" in message
    assert "/nowhere/page cannot be written" in message
