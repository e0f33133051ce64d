"""Updates of the page: the whole state and the changes after it add up to the model."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.contract import events
from phalanx.watch.model import simulation
from phalanx.watch.model.run_model import RunModel
from phalanx.watch.page import updates as page_updates
from phalanx.watch.page.protocol import Head, PageUpdate, RankRow, TimelineEntry
from phalanx.watch.page.updates import SECONDS, Updates, encode
from tests.watch.any_events import EVENTS

_decoder = msgspec.json.Decoder(PageUpdate)


@dataclass
class Client:
    """The state of the page."""

    head: Head | None = None
    rows: dict[int, RankRow] = field(default_factory=dict)
    strips: dict[int, dict[int, str]] = field(default_factory=dict)  # letter by tenth of a second
    curves: dict[str, list[tuple[int, float, float]]] = field(default_factory=dict)
    events: list[TimelineEntry] = field(default_factory=list)
    links: object = ()

    def receive(self, line: bytes) -> None:
        update = _decoder.decode(line)
        self.head, self.links = update.head, update.links or self.links
        for rank in update.gone:
            del self.rows[rank]
            self.strips.pop(rank, None)
        self.rows |= {row.rank: row for row in update.rows}
        for rank, (start, letters) in update.strips.items():
            first = round(start * 10)
            mine = self.strips.setdefault(rank, {})
            assert not mine.keys() & set(range(first, first + len(letters))), "no letter is sent twice"
            mine |= {first + place: letter for place, letter in enumerate(letters)}
        for name, points in update.curves.items():
            self.curves.setdefault(name, []).extend(points)
        self.events += update.events


def _tail(strips: dict[int, dict[int, str]]) -> dict[int, list[tuple[int, str]]]:
    return {rank: sorted(letters.items())[-100:] for rank, letters in strips.items() if letters}


def test_a_newcomer_sees_what_the_first_one_sees() -> None:
    model = RunModel()
    updates = Updates(model)
    first = Client()
    first.receive(encode(updates.whole()))
    newcomers = []
    for number, event in enumerate(simulation.run(6, 70)):
        model.apply(event)
        if number % 17 == 5:  # in between two updates
            newcomer = Client()
            newcomer.receive(encode(updates.whole()))
            newcomers.append(newcomer)
        if number % 3 == 0:
            update = updates.next()
            assert update is not None
            for client in (first, *newcomers):
                client.receive(encode(update))
    model.apply(events.NoteEvent(time=model.now, text="the last word"))
    last = updates.next()
    assert last is not None
    for client in (first, *newcomers):
        client.receive(encode(last))
    assert len(newcomers) > 5
    assert updates.next() is None, "nothing has happened since"
    assert first.rows.keys() == model.ranks.keys()
    assert [one.text for one in first.events] == [one.text for one in model.timeline.latest]
    assert first.curves["loss"] == model.progress.curves["loss"].points
    view = model.ranks[2]
    assert "".join(letter for _, letter in sorted(first.strips[2].items())) == view.activity.strip.letters
    for client in newcomers:
        assert (client.head, client.rows, client.links) == (first.head, first.rows, first.links)
        assert (client.curves, client.events) == (first.curves, first.events)
        assert _tail(client.strips) == _tail(first.strips)


def test_only_changes_are_sent() -> None:
    model = RunModel()
    for event in simulation.run(16, 10):
        model.apply(event)
    updates = Updates(model)
    whole = updates.whole()
    assert (len(whole.rows), len(whole.links), whole.measured) == (16, 1, 1.7e9 - 3600)
    model.apply(events.NoteEvent(time=model.now, text="a word"))
    update = updates.next()
    assert update is not None
    assert (update.rows, update.strips, update.curves, update.gone, update.links) == ((), {}, {}, (), ())
    assert [one.text for one in update.events] == ["a word"]
    model.apply(events.WorkerExited(time=model.now, rank=2, pid=model.ranks[2].location.pid, code=-9))
    update = updates.next()
    assert update is not None
    assert [(row.rank, row.health) for row in update.rows] == [(2, "dead")]


def test_rows_are_computed_only_if_a_rank_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """32,768 of them take 0.3 s, and a loss is several events."""
    model = RunModel()
    for event in simulation.run(16, 10):
        model.apply(event)
    updates = Updates(model)
    updates.whole()
    computed: list[int] = []
    row = page_updates._row
    monkeypatch.setattr(page_updates, "_row", lambda view: computed.append(view.rank) or row(view))
    for text in ("a word", "another"):
        model.apply(events.NoteEvent(time=model.now, text=text))
        update = updates.next()
        assert update is not None
        assert [one.text for one in update.events] == [text]
    model.apply(events.FaultEvent(time=model.now, rank=20, reason="node 2 is lost", recovery="regroup"))
    assert updates.next() is not None
    assert not computed
    model.apply(events.WorkerExited(time=model.now, rank=2, pid=model.ranks[2].location.pid, code=-9))
    updates.next()
    assert len(computed) == 16


def test_ranks_that_are_gone_and_verdicts_that_stand() -> None:
    model = RunModel()
    updates = Updates(model)
    for event in (*simulation.begin(4, now=100.0), *simulation.second(1, 4, now=103.0)):
        model.apply(event)
    updates.whole()
    infos = tuple(events.RankInfo(rank=rank, pid=1000 + rank) for rank in range(2))
    model.apply(events.RankInfos(time=104.0, nodes=(events.NodeRanks(ranks=infos),)))
    model.apply(events.ClusterSample(time=107.0, seconds=1.0))
    model.apply(events.VerdictEvent(time=107.0, kind="data", text="rank 1 is stuck", ranks=(1,)))
    update = updates.next()
    assert update is not None
    assert sorted(update.gone) == [2, 3]
    assert update.head.world_size == 2
    for _ in range(2):
        assert update is not None
        assert [one.text for one in update.verdicts] == ["rank 1 is stuck"]
        model.apply(events.NoteEvent(time=108.0, text="a word"))
        update = updates.next()


def test_a_roll_that_is_called() -> None:
    model = RunModel()
    model.apply(events.RendezvousProgress(time=1, expected=2, joined=("a",), missing=("b",), text="waiting for b"))
    roll = Updates(model).whole().rendezvous
    assert roll is not None
    assert msgspec.json.decode(msgspec.json.encode(roll)) | {"event": "", "time": 1} == {
        "event": "",
        "time": 1,
        "expected": 2,
        "joined": ["a"],
        "missing": ["b"],
        "text": "waiting for b",
    }


@pytest.mark.parametrize("seconds", [SECONDS, 200.0])
def test_a_whole_has_the_last_seconds(seconds: float) -> None:
    model = RunModel()
    for event in simulation.run(2, 90):
        model.apply(event)
    start, letters = Updates(model, seconds=seconds).whole().strips[0]
    assert len(letters) == min(seconds * 10, len(model.ranks[0].activity.strip.letters))
    assert start + len(letters) / 10 == pytest.approx(model.ranks[0].activity.strip.end)


@settings(max_examples=40, deadline=None)
@given(EVENTS, st.randoms(use_true_random=False))
def test_any_events_in_any_order(happened: list[events.AnyEvent], chance: object) -> None:
    model = RunModel()
    updates = Updates(model)
    client = Client()
    client.receive(encode(updates.whole()))
    for event in happened:
        model.apply(event)
        if chance.random() < 0.5 and (update := updates.next()) is not None:  # type: ignore[attr-defined]
            client.strips.clear()  # if the clock is set back, they are sent again
            client.receive(encode(update))
    if (update := updates.next()) is not None:
        client.strips.clear()
        client.receive(encode(update))
    newcomer = Client()
    newcomer.receive(encode(updates.whole()))
    assert (newcomer.rows, newcomer.head) == (client.rows, client.head)
    assert newcomer.curves == client.curves


def test_updates_of_512_ranks_are_fast_and_small() -> None:
    model = RunModel()
    updates = Updates(model)
    sizes, took = [], []
    for event in simulation.begin(512, now=100.0):
        model.apply(event)
    for second in range(35):
        for event in simulation.second(second, 512, now=102.0 + second):
            model.apply(event)
        then = time.process_time()
        update = updates.next()
        assert update is not None
        line = encode(update)
        took.append(time.process_time() - then)
        sizes.append(len(line))
    assert statistics.median(sizes) < 150_000
    assert len(encode(updates.whole())) < 500_000
    assert statistics.median(took) < 0.2, "4 ms on a machine that does nothing else"
