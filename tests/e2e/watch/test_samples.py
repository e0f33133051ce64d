"""Samples of a run: two nodes and a rank that is replaced; a script that prints its loss."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.contract import events
from phalanx.contract.events import AnyEvent
from tests.e2e.places import script
from tests.kit import cli
from tests.kit.cli import Env, free_port, start, until

RunEvents = tuple[list[AnyEvent], list[AnyEvent]]
pytestmark = pytest.mark.xdist_group("samples")


@pytest.fixture(scope="module")
def env() -> Iterator[Env]:
    with cli.warm_environment("torch._dynamo") as env:  # which optimizers import
        yield env


def read_events(env: Env, name: str) -> RunEvents:
    """Return events and samples of the run so far."""
    found: list[list[AnyEvent]] = []
    for kind in ("events", "samples"):
        paths = Path(str(env["PHALANX_HOME"]), "runs").glob(f"{name}-*/{kind}.jsonl")
        lines = [line for path in paths for line in path.read_bytes().split(b"\n")[:-1]]
        found.append([events.decode(line) for line in lines])
    return found[0], found[1]


def faces(of: RunEvents) -> list[events.RankInfos]:
    return [event for event in of[0] if isinstance(event, events.RankInfos)]


def samples(of: RunEvents) -> list[events.ClusterSample]:
    return [event for event in of[1] if isinstance(event, events.ClusterSample)]


def measured(of: RunEvents) -> list[events.MetricsMeasured]:
    return [event for event in of[1] if isinstance(event, events.MetricsMeasured)]


def busy(sample: events.ClusterSample, generation: int) -> bool:
    """Return whether all three ranks train with known speed, phase and place: on a loaded machine there may be no
    sample yet.
    """
    trains = [one for one in sample.ranks if one.samples > 0 and one.compute > 0 and "sampled.py:" in one.place]
    return len(trains) == 3 and sample.generation == generation


@pytest.fixture(scope="module")
def trained(env: Env, tmp_path_factory: pytest.TempPathFactory) -> RunEvents:
    folder = tmp_path_factory.mktemp("sampled")
    same = ("run", "-n", "2", "-g", "2,1", "--cpu", "--master", f"localhost:{free_port()}")
    what = (script("sampled.py"), str(folder))
    with start(*same, "-i", "0", *what, env=env) as one, start(*same, "-i", "1", *what, env=env) as other:
        until(
            lambda: any(busy(sample, 0) for sample in samples(read_events(env, "sampled"))),
            90,
            "three ranks to be seen",
        )
        (folder / "die").touch()
        until(lambda: any(busy(sample, 1) for sample in samples(read_events(env, "sampled"))), 90, "another to be seen")
        (folder / "end").touch()
        assert [one.wait(60), other.wait(60)] == [0, 0], one.both + other.both
    return read_events(env, "sampled")


def test_nodes_are_seen_to_gather(trained: RunEvents) -> None:
    calls = [event for event in trained[0] if isinstance(event, events.RendezvousProgress)]
    assert [len(call.joined) for call in calls] in ([1, 2], [2])
    assert (calls[-1].expected, calls[-1].missing) == (2, ())
    assert calls[0].missing == ("node 1",) or len(calls) == 1


def test_all_ranks_are_known_and_replacements_too(trained: RunEvents) -> None:
    assert all(before.nodes != after.nodes for before, after in itertools.pairwise(faces(trained)))
    last = faces(trained)[-1]
    assert [(face.rank, node.node) for node, face in last.each()] == [(0, 0), (1, 0), (2, 1)]
    pids = {face.pid for event in faces(trained) for _, face in event.each() if face.rank == 2}
    assert len(pids) == 2


def test_every_second_has_its_letters(trained: RunEvents) -> None:
    seen = samples(trained)
    assert all(before.time <= after.time for before, after in itertools.pairwise(seen))
    assert seen[-1].generation == 1
    for rank in range(3):
        letters = ""
        for sample in seen:
            for row in sample.ranks:
                letters += row.phases if row.rank == rank else ""
        # A node that was late covers more than the second of one sample, so only all seconds together are a limit.
        assert len(letters) <= round(10 * (seen[-1].time - seen[0].time + 1))
        assert set(letters.lower()) <= {*events.LETTERS.values(), events.UNSEEN}
        assert sum(letter.isupper() for letter in letters) >= 10  # steps
    last = seen[-1].ranks
    steps = measured(trained)[-1].step
    assert [(row.rank, row.step, row.state) for row in last] == [(rank, steps, "E") for rank in range(3)]
    for rank in range(3):  # not in every second: in its last one a rank is ending
        every = [row for sample in seen for row in sample.ranks if row.rank == rank]
        assert any(row.memory > 1 << 20 and "sampled.py:" in row.place for row in every)
        assert 0 < max(row.compute for row in every) <= 1


def test_what_was_measured_is_reported(trained: RunEvents) -> None:
    found = measured(trained)
    last = found[-1]
    assert last.total > last.step > 0
    assert last.samples > 0
    assert last.values["odd"] is None
    assert last.values["loss"] is not None
    assert len(found) < 6 * (last.time - found[0].time) + 3


PLAIN = """
import itertools, os, sys, time
for step in itertools.count():
    time.sleep(0.05)
    print(f"step {step}/99 loss {1 / (step + 1):.3f}", flush=True)
    if os.path.exists(sys.argv[1]):
        break
print("Epoch 2 val_loss: 0.5", flush=True)
"""


@pytest.mark.smoke
def test_the_loss_that_a_plain_script_prints_is_seen(env: Env, tmp_path: Path) -> None:
    path = tmp_path / "prints.py"
    path.write_text(PLAIN)
    with start("run", "--fresh", "--cpu", str(path), str(tmp_path / "end"), env=env) as job:
        until(lambda: bool(measured(read_events(env, "prints"))), 60, "a loss to be seen")
        (tmp_path / "end").touch()
        assert job.wait(60) == 0, job.err
    first, *_, last = measured(read_events(env, "prints"))
    assert (last.values["val_loss"], last.epoch) == (0.5, 2)
    assert first.total == 99
    assert first.values["loss"] == pytest.approx(1 / (first.step + 1), abs=0.001)
