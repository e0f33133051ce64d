"""Ranks die, and the training continues: real processes, real signals. Undisturbed runs are the oracle."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.contract import events
from phalanx.launcher.output.console import withheld
from tests.kit.cli import phalanx
from tests.train.elastic.surviving import SCRIPT, ended, places, trained, undisturbed, warm

pytestmark = pytest.mark.xdist_group("survive")  # they share an undisturbed run


@pytest.fixture(scope="module", autouse=True)
def _warm() -> Iterator[None]:
    with warm():
        yield


def test_a_dead_rank_costs_no_step(tmp_path: Path) -> None:
    ways = ["kill", "segv", "exit", "raise"]
    done = trained(tmp_path, 2, *([3 * number + 3, 1, how] for number, how in enumerate(ways)))
    assert done.code == 0, done.err
    end, generation = ended(tmp_path, 2)
    assert end == undisturbed(2)
    assert f"{generation} faults survived" in done.err
    again = r"rank 1 failed: [^;\n]*; regrouped, and step (\d+) was committed [\d.]+ s later, (.*)"
    lines = re.findall(again, done.err)
    folder = Path(re.findall(r"output in (\S+)", done.err)[0])
    recorded = [events.decode(line) for line in (folder / "events.jsonl").read_bytes().splitlines()]
    faults = [event for event in recorded if isinstance(event, events.FaultEvent)]
    assert {fault.recovery for fault in faults} == {"regroup"}
    assert sum(fault.rank == 1 for fault in faults) == 4
    assert len(faults) == generation
    recovered = [event for event in recorded if isinstance(event, events.Recovered)]
    assert len(recovered) == 4
    for number, one in enumerate(recovered):
        # Whether the survivor has completed the step that the dead rank had committed depends on the network. At most
        # that step is repeated, which no other rank had.
        assert (one.step - 3 * number, one.redone) in {(4, 0), (3, 0), (3, 1)}
        assert lines[number] == (str(one.step), "1 step done again" if one.redone else "no step lost")
        assert 0 < one.seconds < 60


@pytest.mark.extended
def test_a_failure_is_reported_once_however_long_its_replacement_takes(tmp_path: Path) -> None:
    late = tmp_path / "late.py"
    late.write_text(
        "import os, time, torch, phalanx\n"
        "def train(run):\n"
        f"    if run.group.generation: time.sleep({withheld.DELAY} + 2)\n"
        "    model = torch.nn.Linear(1, 1)\n"
        "    opt = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    run.keep(model, opt)\n"
        "    net = run.wrap(model)\n"
        "    while run.steps < 4:\n"
        "        run.backward(net(torch.ones(1, 1)).sum())\n"
        "        run.step(opt)\n"
        "        if (run.rank, run.steps, run.group.generation) == (1, 2, 0): raise ValueError('a broken sample')\n"
        "phalanx.main(train)\n"
    )
    done = phalanx("run", "-g", "2", "--cpu", str(late), env=places)
    assert done.code == 0, done.err
    assert "rank 1 failed: ValueError: a broken sample; regrouped, and step" in done.err
    assert done.err.count("a broken sample") == 2  # the message, and the line of the script
    assert "Traceback" not in done.err


def test_what_a_rank_has_logged_just_before_a_kill_is_kept(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(
        "import os, signal, torch, phalanx\n"
        "def train(run):\n"
        "    model = torch.nn.Linear(1, 1)\n"
        "    opt = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    run.keep(model, opt)\n"
        "    net = run.wrap(model)\n"
        "    while run.steps < 9:\n"
        "        run.backward(loss := net(torch.ones(1, 1)).sum())\n"
        "        run.step(opt, loss=loss)\n"
        "        if run.steps in (3, 6): run.group.barrier()\n"  # all have committed this step
        "        if run.steps == 3 * (run.rank + 1):\n"
        "            run.log(first=run.rank + 1.0)\n"
        "            run.log(second=run.rank + 1.0)\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "phalanx.main(train)\n"
    )
    done = phalanx("run", "-g", "2", "--cpu", str(script), env=places)
    assert done.code == 0, done.err
    folder = Path(re.findall(r"output in (\S+)", done.err)[0])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 10))
    logged = [(line["step"], line.get("rank", 0), *(line.keys() & {"first", "second"})) for line in lines]
    expected = [(3, 0, "first"), (3, 0, "second"), (6, 1, "first"), (6, 1, "second")]
    assert [one for one in logged if len(one) > 2] == expected


def test_one_rank_that_fails_in_the_same_way_again_shows_its_traceback_once(tmp_path: Path) -> None:
    script = tmp_path / "shapes.py"
    script.write_text(
        "import torch, phalanx\n"
        "def train(run):\n"
        "    print('Tr', end='', flush=True)\n"
        "    torch.nn.Linear(4, 1)(torch.ones(4, 5))\n"
        "phalanx.main(train)\n"
    )
    done = phalanx("run", "-g", "1", "--cpu", str(script), env=places)
    assert done.code == 1, done.err
    assert done.err.count("Traceback (most recent call last)") == 1
    assert done.err.count("torch.nn.Linear(4, 1)(torch.ones(4, 5))") == 1
    assert "not retrying: the same failure on the second try" in done.err
    assert done.out == "TrTr"
    folder = Path(re.findall(r"all of its output: (\S+)", done.err)[0])
    assert (folder / "stderr.log").read_text().count("Traceback (most recent call last)") == 2


@pytest.mark.extended
def test_one_rank_that_calls_what_does_not_exist_is_not_tried_again(tmp_path: Path) -> None:
    script = tmp_path / "typo.py"
    script.write_text("import phalanx\ndef train(run):\n    print('try')\n    run.epoch(2)\nphalanx.main(train)\n")
    done = phalanx("run", "-g", "1", "--cpu", str(script), env=places)
    assert (done.code, done.out) == (1, "try\n"), done.err
    assert done.err.count("Traceback (most recent call last)") == 1
    assert done.err.splitlines()[-1] == "  not retrying: an error in the script or its arguments"


@pytest.mark.extended
def test_a_survivor_that_cannot_leave_the_group_is_replaced(tmp_path: Path) -> None:
    done = trained(tmp_path, 3, [5, 1, "stuck"], [5, 0, "then"])
    assert done.code == 0, done.err
    assert ended(tmp_path, 3)[0] == undisturbed(3)
    assert re.search("rank 1 cannot leave the group.*: SIGKILL", done.err)


@pytest.mark.extended
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_sole_survivor_that_cannot_leave_the_group_hands_over_what_it_has_first(tmp_path: Path, ranks: int) -> None:
    """Bit-identical with three ranks too, whose sum depends on the position of a number in DDP's buckets."""
    done = trained(tmp_path, ranks, [5, 1, "stuck", "within"], *([5, rank, "then"] for rank in (0, 2)[: ranks - 1]))
    assert done.code == 0, done.err
    assert ended(tmp_path, ranks)[0] == undisturbed(ranks)
    assert "rank 1 cannot leave the group; step 5 is saved in memory: SIGKILL" in done.err
    assert "resumed from a snapshot in memory at step 5" in done.out
    assert re.search(r"regrouped, and step 6 was committed [\d.]+ s later, no step lost", done.err)


def test_a_spare_worker_takes_the_place_of_a_dead_one(tmp_path: Path) -> None:
    """It exists before it is needed: the rank that it replaces is stopped, and detected after a while."""
    done = trained(tmp_path, 2, [3, 1, "stop"], options=("--spares", "1", "--worker-timeout", "5s"))
    assert done.code == 0, done.err
    assert ended(tmp_path, 2)[0] == undisturbed(2)
    (folder,) = re.findall(r"output in (\S+)", done.err)
    recorded = [events.decode(line) for line in (Path(folder) / "events.jsonl").read_bytes().splitlines()]
    spares = [event.pid for event in recorded if isinstance(event, events.WorkerStarted) and event.spare]
    seated = [
        (event.pid, event.rank, event.previous_rank) for event in recorded if isinstance(event, events.RankChanged)
    ]
    assert seated[0] == (spares[0], 1, 2)


@pytest.mark.extended
def test_a_crash_that_only_repeats_ends_the_run(tmp_path: Path) -> None:
    done = trained(tmp_path, 2, [5, 1, "always"])
    assert done.code == 1
    assert "rank 1 failed: ValueError: a broken sample" in done.err
    assert "not retrying: the same failure 3 times" in done.err


@pytest.mark.extended
@pytest.mark.parametrize(("most", "code"), [("0", 137), ("1", 137), ("2", 0)])
def test_max_restarts_is_respected(tmp_path: Path, most: str, code: int) -> None:
    done = trained(tmp_path, 2, [3, 0, "kill"], [5, 1, "kill"], options=("--max-restarts", most))
    assert done.code == code, done.err
    assert ("1 recovery was allowed, and is used up" in done.err) == (most == "1")


@pytest.mark.extended
def test_what_a_survivor_has_made_stays_and_groups_of_the_script_are_left(tmp_path: Path) -> None:
    """A rank is stopped while another waits for it in a group of the script; one dies before the first common step; and
    one right after the next.
    """
    faults = [[0, 2, "kill"], [1, 1, "stop"], [2, 0, "kill"]]
    words = ("run", "-g", "3", "--cpu", "--worker-timeout", "4s", SCRIPT, str(tmp_path), json.dumps(faults), "once")
    done = phalanx(*words, env=places)
    assert done.code == 0, done.err
    end, generation = ended(tmp_path, 3)
    assert end == undisturbed(3)
    assert generation >= 3  # on a slow machine others may seem silent too
    made = [path.read_text().split() for path in sorted(tmp_path.glob("made.*"))]
    assert all(len(set(each)) == 1 for each in made)  # the very same object in each process
    assert max(map(len, made)) >= 2
    assert len(made) >= 3 + len(faults)


@pytest.mark.extended
def test_what_a_script_does_at_the_end_of_an_epoch_counts_once(tmp_path: Path) -> None:
    done = trained(tmp_path, 2, [8, 1, "kill", "end"])
    assert done.code == 0, done.err
    end, generation = ended(tmp_path, 2)
    assert end == undisturbed(2)
    assert generation >= 1


@pytest.mark.extended
def test_a_model_that_is_wrapped_first_is_not_written_over(tmp_path: Path) -> None:
    """By rank 0, which is new; nor is the learning rate, if only the scheduler is created again."""
    words = ("run", "-g", "2", "--cpu", SCRIPT, str(tmp_path), json.dumps([[10, 0, "kill"]]), "once", "early")
    done = phalanx(*words, env=places)
    assert done.code == 0, done.err
    end, generation = ended(tmp_path, 2)
    assert generation >= 1
    assert end == {name: pytest.approx(values, rel=1e-4, abs=1e-6) for name, values in undisturbed(2).items()}


@pytest.mark.extended
def test_who_begins_again_begins_with_nothing_of_what_is_lost(tmp_path: Path) -> None:
    """The only survivor was between two updates of a step."""
    faults = json.dumps([[5, 1, "kill", "half"]])
    done = phalanx("run", "-g", "2", "--cpu", SCRIPT, str(tmp_path), faults, "once", "halves", env=places)
    assert done.code == 0, done.err
    end, generation = ended(tmp_path, 2)
    assert end == undisturbed(2)
    assert generation >= 1


@pytest.mark.extended
def test_fifty_groups_leave_nothing(tmp_path: Path) -> None:
    """Neither descriptors nor memory; some groups were aborted while a rank waited in one, and some were forked."""
    script = str(Path(__file__).parents[1] / "scripts" / "many_groups.py")
    done = phalanx("run", "-g", "2", "--cpu", script, str(tmp_path), env=places)
    assert done.code == 0, done.err
    for rank in range(2):
        found = json.loads((tmp_path / f"end.{rank}").read_text())
        assert len(found) == 10
        assert [regions for regions, _ in found[::2]] == [2] * 5  # its own memory of gradients, and the other's
        assert all(held == found[0][1] for _, held in found)


@pytest.mark.extended
def test_fsdp_continues_where_no_shard_is_lost(tmp_path: Path) -> None:
    script = str(Path(__file__).parents[1] / "scripts" / "regroup.py")
    done = phalanx("run", "-g", "2", "--cpu", script, str(tmp_path), env=places)
    assert done.code == 0, done.err
    for rank in range(2):
        for taken, ours, theirs in json.loads((tmp_path / f"end.{rank}").read_text()):
            assert taken
            assert ours == theirs


@pytest.mark.extended
def test_a_survivor_may_have_buffers_that_its_forward_has_registered(tmp_path: Path) -> None:
    """The new rank registers them later, so DDP can send them neither now nor before a forward."""
    ends = []
    for step in (-1, 5):
        folder = tmp_path / f"{step}"
        folder.mkdir()
        script = (str(Path(SCRIPT).with_name("cached.py")), str(folder), str(step))
        done = phalanx("run", "-g", "2", "--cpu", *script, env=places)
        assert done.code == 0, done.err
        ends += [json.loads((folder / f"end.{rank}").read_text()) for rank in range(2)]
    assert ends == [ends[0]] * 4
    assert done.err.count("regrouped") == 1
    assert "no step lost" in done.err
