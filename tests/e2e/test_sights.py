"""Runs as whoever watches sees them: two nodes and a rank that is replaced; a script that prints its loss."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.contract import events
from phalanx.contract.events import AnyEvent
from tests.e2e.places import script
from tests.kit import cli
from tests.kit.cli import Env, free_port, phalanx, start

STEPS, DIES_AT = 140, 50
pytestmark = pytest.mark.xdist_group("sights")


@pytest.fixture(scope="module")
def env() -> Iterator[Env]:
    with cli.stage() as env:
        yield env


def told(home: str, name: str) -> tuple[list[AnyEvent], list[AnyEvent]]:
    """Of the run of that script: its events, and what was seen."""
    (folder,) = Path(home, "runs").glob(f"{name}-*")
    return tuple(  # type: ignore[return-value]
        [events.decode(line) for line in (folder / f"{kind}.jsonl").read_bytes().splitlines()]
        for kind in ("events", "sights")
    )


@pytest.fixture(scope="module")
def trained(env: Env) -> tuple[list[AnyEvent], list[AnyEvent]]:
    where = f"localhost:{free_port()}"
    same = ("run", "-n", "2", "-g", "2,1", "--cpu", "--master", where)
    what = (script("sighted.py"), str(STEPS), str(DIES_AT))
    with start(*same, "-i", "0", *what, env=env) as one, start(*same, "-i", "1", *what, env=env) as other:
        assert [one.wait(120), other.wait(60)] == [0, 0], one.both + other.both
    return told(str(env["PHALANX_HOME"]), "sighted")


def test_nodes_are_seen_to_gather(trained: tuple[list[AnyEvent], list[AnyEvent]]) -> None:
    calls = [event for event in trained[0] if isinstance(event, events.RollCall)]
    assert [len(call.here) for call in calls] in ([1, 2], [2])
    assert (calls[-1].expected, calls[-1].missing) == (2, ())
    assert calls[0].missing == ("node 1",) or len(calls) == 1


def test_everybody_is_known_and_whoever_takes_the_place_of_another(
    trained: tuple[list[AnyEvent], list[AnyEvent]],
) -> None:
    faces = [event for event in trained[0] if isinstance(event, events.Faces)]
    assert all(before.ranks != after.ranks for before, after in itertools.pairwise(faces))
    last = faces[-1].ranks
    assert [(face.rank, face.node) for face in last] == [(0, 0), (1, 0), (2, 1)]
    pids = {face.pid for event in faces for face in event.ranks if face.rank == 2}
    assert len(pids) == 2


def test_every_second_has_its_letters(trained: tuple[list[AnyEvent], list[AnyEvent]]) -> None:
    sights = [event for event in trained[1] if isinstance(event, events.Sight)]
    assert all(before.time < after.time for before, after in itertools.pairwise(sights))
    assert sights[-1].generation == 1
    for rank in range(3):
        letters = ""
        for sight in sights:
            for glance in sight.ranks:
                if glance.rank == rank:
                    assert len(glance.phases) in (0, round(sight.seconds * 10))
                    letters += glance.phases
        assert set(letters.lower()) <= {*events.LETTERS.values(), events.UNSEEN}
        assert sum(letter.isupper() for letter in letters) >= 10  # steps
    last = sights[-1].ranks
    assert [(glance.rank, glance.step, glance.state) for glance in last] == [(rank, STEPS, "E") for rank in range(3)]
    busy = [sight for sight in sights if len(sight.ranks) == 3 and all(one.samples > 0 for one in sight.ranks)]
    assert busy
    for glance in busy[-1].ranks:
        assert glance.memory > 1 << 20
        assert 0 < glance.compute <= 1
        assert "sighted.py:" in glance.place


def test_what_was_measured_is_told_to_the_last_step(trained: tuple[list[AnyEvent], list[AnyEvent]]) -> None:
    measured = [event for event in trained[1] if isinstance(event, events.Measured)]
    last = measured[-1]
    assert last.step == STEPS
    assert last.total > STEPS
    assert last.samples > 0
    assert last.values["odd"] is None
    assert last.values["loss"] is not None
    assert len(measured) < 6 * (measured[-1].time - measured[0].time) + 3


PLAIN = """
import time
for step in range(25):
    time.sleep(0.1)
    print(f"step {step}/25 loss {1 / (step + 1):.3f}", flush=True)
print("Epoch 2 val_loss: 0.5", flush=True)
"""


def test_the_loss_that_a_plain_script_prints_is_seen(env: Env, tmp_path: Path) -> None:
    path = tmp_path / "prints.py"
    path.write_text(PLAIN)
    done = phalanx("run", "--fresh", "--cpu", str(path), env=env)
    assert done.code == 0, done.err
    measured = [event for event in told(str(env["PHALANX_HOME"]), "prints")[1] if isinstance(event, events.Measured)]
    assert len(measured) >= 2
    last = measured[-1]
    assert (last.total, last.values["val_loss"], last.epoch) == (0, 0.5, 2)
    assert measured[0].total == 25
    assert measured[0].step < 25
    assert measured[0].values["loss"] == pytest.approx(1 / (measured[0].step + 1), abs=0.001)
