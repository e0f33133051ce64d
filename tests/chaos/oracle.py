"""What must hold for a disturbed training, and how long each fault has delayed it."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.contract import events
from tests.kit.cli import Env, phalanx, warm_environment

SCRIPT = str(Path(__file__).parent / "scripts" / "train.py")
SAMPLES, EPOCH = 96, 8  # samples and steps of an epoch
LONG = 180.0  # seconds: a bound for hangs, not for slowness
SLOW = 20.0  # seconds of a recovery that must be investigated, on any machine
Parameters = dict[str, list[float]]


@dataclass(frozen=True)
class Take:
    """A rank took these samples for a step."""

    time: float
    rank: int
    step: int
    group: str
    size: int
    places: tuple[int, ...]


@dataclass(frozen=True)
class Commit:
    """A rank committed a step."""

    time: float
    rank: int
    step: int
    group: str


def read(folder: Path) -> tuple[list[Take], list[Commit]]:
    """Read what all ranks have written so far."""
    takes, commits = [], []
    for path in folder.glob("log.*"):
        rank = int(path.suffix[1:])
        for text in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # a line that is just being written
                line: dict[str, Any] = json.loads(text)
                words = line["time"], rank, line["step"], line["group"]
                if "taken" in line:
                    takes.append(Take(*words, line["size"], tuple(line["taken"])))
                else:
                    commits.append(Commit(*words))
    return takes, commits


_places: list[Env] = []  # of the current round: its fork server also serves undisturbed runs


@contextlib.contextmanager
def using(env: Env) -> Iterator[None]:
    """Run undisturbed trainings in this environment, too, during the block."""
    _places.append(env)
    try:
        yield
    finally:
        _places.pop()


@functools.cache
def _undisturbed(ranks: int, epochs: int, dropout: str) -> list[Parameters]:
    places = contextlib.nullcontext(_places[-1]) if _places else warm_environment("torch._dynamo")
    with places as env, tempfile.TemporaryDirectory(prefix="chaos-", dir="/tmp") as folder:
        words = ("run", "-g", str(ranks), "--cpu", "--quiet", SCRIPT, folder, "[]")
        done = phalanx(*words, env={**env, "EPOCHS": str(epochs), "DROPOUT": dropout}, timeout=LONG)
        assert done.code == 0, done.err
        return [json.loads(line) for line in Path(folder, "epochs").read_text().splitlines()]


def undisturbed(ranks: int, epochs: int, dropout: str = "0.2") -> Parameters:
    """Return the parameters of an undisturbed run after this many epochs."""
    # one run covers many numbers of epochs
    made = next((made for made in (7, 25, 100) if epochs <= made), -(-epochs // 300) * 300)
    return _undisturbed(ranks, made, dropout)[epochs - 1]


def check_samples(takes: Iterable[Take], steps: int) -> None:
    """Check that every sample counts once per epoch. Of a repeated step, the last group counts."""
    by_step: dict[int, list[Take]] = defaultdict(list)
    for take in takes:
        by_step[take.step].append(take)
    for epoch in range(steps // EPOCH):
        places: list[int] = []
        for step in range(1 + epoch * EPOCH, 1 + (epoch + 1) * EPOCH):
            last = max(by_step[step], key=lambda take: take.time)
            parts = {take.rank: take.places for take in by_step[step] if take.group == last.group}
            assert len(parts) == last.size, f"step {step}: {len(parts)} of {last.size} ranks took part"
            places += [place for part in parts.values() for place in part]
        assert sorted(places) == list(range(SAMPLES)), f"epoch {epoch + 1}: {sorted(places)}"


def check(folder: Path, ranks: int, *, epochs: int | None = None) -> None:
    """Check that the training is complete: bit-identical parameters on all ranks, and each sample once per epoch."""
    ends = [json.loads((folder / f"end.{rank}").read_text()) for rank in range(ranks)]
    steps, parameters = ends[0]
    assert all(end == ends[0] for end in ends), f"ranks differ at the end: steps {[end[0] for end in ends]}"
    assert steps % EPOCH == 0, f"{steps} steps at the end"
    assert epochs is None or steps == epochs * EPOCH, f"{steps} steps at the end, not {epochs} epochs of {EPOCH}"
    check_samples(read(folder)[0], steps)
    expected = undisturbed(ranks, steps // EPOCH)
    wrong = [name for name, values in expected.items() if parameters[name] != values]
    assert not wrong, f"after {steps} steps, {', '.join(wrong)} differ from the undisturbed run"


def delay(folder: Path, fault: float, ranks: int, *, regroup: bool = True) -> float | None:
    """Return the seconds from a fault to the next commit, by a group of at least this many ranks, of a step that none
    had committed before. None if there is none yet.

    One rank that has committed a step is enough: all ranks of its group took part. Another one may die at the next
    fault before it has recorded the commit; waiting for its line would count later recoveries.

    `regroup`: the fault has ended the group, and a step of the next one counts. A rank may commit one more step in the
    moment before it dies, or before the others notice.
    """
    takes, commits = read(folder)
    last = max((take for take in takes if take.time <= fault), key=lambda take: take.time, default=None)
    group = last.group if regroup and last else None
    known = {commit for commit in commits if commit.time <= fault or commit.group == group}
    done = max((commit.step for commit in known), default=0)
    sizes = {take.group: take.size for take in takes}
    later = (commit for commit in commits if commit.step > done and commit not in known)
    return min((commit.time - fault for commit in later if sizes[commit.group] >= ranks), default=None)


def delays(folder: Path, faults: Iterable[tuple[float, bool]], ranks: int) -> list[float]:
    """Return the delay of each fault, given as its time and whether it ends the group: in a group of this many
    ranks.
    """
    found = [delay(folder, fault, ranks, regroup=regroup) for fault, regroup in faults]
    late = [number for number, took in enumerate(found, 1) if took is None]
    assert not late, f"no step was committed after the faults {late}"
    return [took for took in found if took is not None]


def slow(err: str, faults: Iterable[float], seconds: Iterable[float]) -> list[str]:
    """Return output and events of the run between each fault with a very slow recovery and its end."""
    found = [(fault, took) for fault, took in zip(faults, seconds, strict=True) if took > SLOW]
    if not found:
        return []
    known = happened(err)
    return [
        "\n".join(
            [
                f"a recovery took {took:.1f} s",
                *(f"{event.time - fault:+8.2f} {event}" for event in known if -1 < event.time - fault < took + 1),
                err,
            ]
        )
        for fault, took in found
    ]


def happened(err: str) -> list[events.AnyEvent]:
    """Return the events of the run that printed this."""
    folder = Path(re.findall(r"output in (\S+)", err)[0])
    return [events.decode(line) for line in (folder / "events.jsonl").read_bytes().splitlines()]


def placed(folder: Path) -> list[float]:
    """Return the times of the faults that the script itself made, in the order of their numbers."""
    paths = sorted(folder.glob("victim *"), key=lambda path: int(path.name.split()[1]))
    return [float(path.read_text().split()[1]) for path in paths]
