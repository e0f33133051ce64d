"""Measured links between hosts, which are stored for later runs."""

from __future__ import annotations

import stat
from pathlib import Path

from phalanx.cluster import links
from phalanx.contract.events import LinkMeasured


def test_the_newest_result_of_each_pair_is_kept(tmp_path: Path) -> None:
    home = str(tmp_path / "home")
    assert links.known(home, {"a", "b"}) is None
    old = [
        LinkMeasured(one="a", other="b", latency=1.0, there=1.0, back=1.0),
        LinkMeasured(one="b", other="c", latency=2.0, there=1.0, back=1.0),
    ]
    links.keep(home, old, 10.0)
    links.keep(home, [LinkMeasured(one="b", other="a", latency=3.0, there=1.0, back=1.0)], 20.0)
    links.keep(home, [], 30.0)
    assert links.known(home, {"a", "b"}) == (
        20.0,
        (LinkMeasured(one="b", other="a", latency=3.0, there=1.0, back=1.0),),
    )
    found = links.known(home, {"a", "b", "c"})
    assert found is not None
    assert (found[0], len(found[1])) == (10.0, 2)
    assert links.known(home, {"a", "x"}) is None
    (file,) = Path(home).iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.write_bytes(b"[{")
    assert links.known(home, {"a", "b"}) is None
