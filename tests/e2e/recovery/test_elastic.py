"""Nodes join and leave while a training continues. Hosts of a lab, real links."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import tempfile
from pathlib import Path

import pytest

from phalanx.contract import events
from phalanx.launcher.coordination.leader.readmission import FIRST_DELAY
from tests.e2e.jobs import all_gone, codes, texts
from tests.e2e.places import script
from tests.kit.cli import Env, phalanx, until, warm_environment
from tests.kit.handle import Handle
from tests.kit.lab import Lab, Node
from tests.kit.proc import pid_inside

SHORT = ("--node-timeout", "10s")  # a busy machine may let an agent wait for seconds
STEPS = 8  # an epoch
pytestmark = pytest.mark.warmed


def node(
    lab: Lab,
    place: int,
    folder: Path,
    *options: str,
    nodes: str = "1:3",
    ranks: int = 1,
    master: int = 0,
    env: Env | None = None,
) -> Handle:
    where = ("-n", nodes, "-g", str(ranks), "--cpu", "--master", lab[master].name)
    words = (*options, script("elastic.py"), str(folder))
    return lab[place].start("run", *where, "-i", str(place), *words, env=env)


def entered(job: Handle, size: int | str, after: int = -1) -> int:
    """Wait until a rank that this node shows is in a group of this size, newer than generation `after`. Returns the
    group's generation: a late node joins a group that exists, and a survivor that gloo does not release makes one more.
    """
    newer = "|".join(map(str, range(after + 1, after + 30)))
    found = job.wait_for(re.compile(rf"generation ({newer}): rank \d of {size}\b"))
    return int(found[-1][1])


def inside(node: Node, pid: int) -> int:
    """Return the process that has this pid on a host."""
    (found,) = (process.pid for process in node.living() if pid_inside(process.pid) == pid)
    return found


def changes(job: Handle) -> list[events.FaultEvent]:
    """Return the changes of the group that this node has recorded."""
    (folder,) = re.findall(r"output in (\S+)", job.err)[:1]
    found = [events.decode(line) for line in Path(folder, "events.jsonl").read_bytes().splitlines()]
    return [event for event in found if isinstance(event, events.FaultEvent)]


def learnt(folder: Path) -> None:
    """Check that every sample was committed once per epoch, and that the parameters are those of an undisturbed
    training.
    """
    epochs, steps, end = json.loads((folder / "result").read_text())
    assert steps == epochs * STEPS
    for epoch in range(epochs):
        taken: list[int] = []
        for step in range(1 + epoch * STEPS, 1 + (epoch + 1) * STEPS):
            found = [json.loads(path.read_text()) for path in folder.glob(f"{step}.*")]
            last = max(generation for generation, _, _ in found)
            parts = [places for generation, _, places in found if generation == last]
            assert len(parts) == next(size for generation, size, _ in found if generation == last)
            taken += [place for places in parts for place in places]
        assert sorted(taken) == list(range(96)), f"epoch {epoch}"
    alone = undisturbed(-(-epochs // 200) * 200)[epochs - 1]
    assert end == {name: pytest.approx(values, rel=1e-3, abs=1e-5) for name, values in alone.items()}


@functools.cache
def undisturbed(epochs: int) -> list[dict[str, list[float]]]:
    """Return the parameters after each epoch."""
    with tempfile.TemporaryDirectory() as folder:
        with warm_environment() as env:
            assert phalanx("run", "-g", "1", "--cpu", script("elastic.py"), folder, str(epochs), env=env).code == 0
        return [json.loads(Path(folder, f"result.{epoch}").read_text()) for epoch in range(1, epochs + 1)]


def test_a_lost_node_is_done_without_and_may_come_back(lab: Lab, tmp_path: Path) -> None:
    jobs = [node(lab, place, tmp_path) for place in range(3)]
    begun = entered(jobs[0], 3)
    jobs[1].process.kill()
    entered(jobs[0], 2, after=begun)
    lost = re.compile(r"node 1 \(node2\) is lost: its connection closed.*; regrouped, and step \d+ was")
    jobs[0].wait_for(lost)
    jobs[0].wait_for("resized from 3 to 2")
    jobs[1] = node(lab, 1, tmp_path)
    entered(jobs[0], 3, after=begun)
    jobs[0].wait_for("resized from 2 to 3")
    entered(jobs[1], 3, after=begun)
    (tmp_path / "end").touch()
    assert codes(jobs) == [0, 0, 0], texts(jobs)
    assert re.search(r"[2-9] changes of nodes", jobs[0].err)  # more if a node was late at the start
    learnt(tmp_path)
    all_gone(lab)


def test_a_node_that_cannot_take_part_is_dismissed_with_the_reason(lab: Lab, tmp_path: Path) -> None:
    jobs = [node(lab, place, tmp_path) for place in range(2)]
    entered(jobs[0], 2)
    reasons = {
        "import": (1, "ImportError: this host has no module named tokens"),
        "abort": (134, "SIGABRT"),
        "length": (2, "data length: 96 samples on ranks 0, 1; 88 samples on rank 2"),
    }
    for count, (bad, (code, reason)) in enumerate(reasons.items(), 1):
        guest = node(lab, 2, tmp_path, env={"BAD": bad})
        assert guest.wait(120) == code, texts([*jobs, guest])
        # It had no ranks when its import failed, so only the abort counts.
        assert ("this host was dismissed before: rank 2 failed: SIGABRT" in guest.err) is (bad == "length")
        assert "this node gets its ranks once" in guest.err
        assert reason in guest.err
        assert "this node was dismissed, and the others continue" in guest.err
        jobs[0].wait_for("node 2 (node3) was dismissed: rank 2 failed", count=count)
        assert reason in jobs[0].err
    jobs.append(node(lab, 2, tmp_path))
    jobs[2].wait_for("this host was dismissed before: ")
    entered(jobs[2], 3)
    (tmp_path / "end").touch()
    assert codes(jobs) == [0, 0, 0], texts(jobs)
    learnt(tmp_path)
    faults = changes(jobs[0])
    dismissed = [place for place, fault in enumerate(faults) if fault.reason == "node 2 (node3) was dismissed"]
    for place, delay in zip(dismissed, (FIRST_DELAY, 2 * FIRST_DELAY), strict=True):
        back = next(fault for fault in faults[place:] if fault.kind == "node-joined")
        assert back.time - faults[place].time > delay - 0.1
    all_gone(lab)


def test_a_node_that_ends_before_its_first_step_is_dismissed(lab: Lab, tmp_path: Path) -> None:
    """Code 0 is no failure, so the others would wait for a rank that never comes. Another script or other arguments."""
    jobs = [node(lab, 0, tmp_path)]
    entered(jobs[0], 1)
    until((tmp_path / f"{STEPS + 1}.0").exists, 60, "an epoch")
    for place, (bad, what) in enumerate({"leave": "a rank of node 1", "end": "the training of node 2"}.items(), 1):
        guest = node(lab, place, tmp_path, env={"BAD": bad})
        assert guest.wait(60) == 1, texts([*jobs, guest])
        assert "this node was dismissed, and the others continue" in guest.err
        jobs[0].wait_for(re.compile(f"was dismissed: {what} .*before its first step in the group: an early return"))
        jobs[0].wait_for(
            re.compile(rf"node {place} .* was dismissed; regrouped, and step \d+ was committed .*no step lost")
        )
    (tmp_path / "end").touch()
    assert codes(jobs) == [0], texts(jobs)
    learnt(tmp_path)
    all_gone(lab)


def test_a_node_with_another_model_is_dismissed(lab: Lab, tmp_path: Path) -> None:
    jobs = [node(lab, place, tmp_path) for place in range(2)]
    begun = entered(jobs[0], 2)
    guest = node(lab, 2, tmp_path, env={"BAD": "shape"})
    assert guest.wait(60) == 2, texts([*jobs, guest])
    assert "the ranks have different models" in guest.err
    jobs[0].wait_for("node 2 (node3) was dismissed: rank 2 failed")
    entered(jobs[0], 2, after=begun)
    (tmp_path / "end").touch()
    assert codes(jobs) == [0, 0], texts(jobs)
    learnt(tmp_path)
    all_gone(lab)


@pytest.mark.parametrize("fault", ["node", "link", "rank"])
def test_machines_of_several_ranks(lab: Lab, tmp_path: Path, fault: str) -> None:
    """Shared memory within a node, gloo between nodes: whatever is lost, the others continue."""
    jobs = [node(lab, place, tmp_path, *SHORT, ranks=2) for place in range(3)]
    begun = entered(jobs[0], "6 by shm")
    if fault == "rank":
        (started,) = jobs[2].wait_for(re.compile(rf"generation {begun}: rank 4 of 6 by shm, pid (\d+)"))
        os.kill(inside(lab[2], int(started[1])), signal.SIGKILL)
        entered(jobs[0], "6 by shm", after=begun)
    else:
        jobs[2].process.kill() if fault == "node" else lab[2].link(False)
        entered(jobs[0], "4 by shm", after=begun)
    (tmp_path / "end").touch()
    staying = jobs if fault == "rank" else jobs[:2]
    assert codes(staying) == [0] * len(staying), texts(jobs)
    learnt(tmp_path)
    if fault == "link":
        assert jobs[2].wait() == 1
    all_gone(lab)


def test_node_0_is_not_sacred(lab: Lab, tmp_path: Path) -> None:
    jobs = [node(lab, place, tmp_path) for place in range(3)]
    begun = entered(jobs[1], 3)
    jobs[0].process.kill()
    entered(jobs[1], 2, after=begun)
    jobs[1].wait_for("this node leads now; others join at")
    jobs[2].wait_for("node 1 (node2) leads now")
    back = node(lab, 0, tmp_path, master=1)
    entered(back, 3, after=begun)
    (tmp_path / "end").touch()
    assert codes([back, *jobs[1:]]) == [0, 0, 0], texts([back, *jobs])
    learnt(tmp_path)
    all_gone(lab)


def test_a_link_that_is_cut_leaves_one_training_not_two(lab: Lab, tmp_path: Path) -> None:
    """Node 0 is alone on its side, so that it ends; the other two continue."""
    jobs = [node(lab, place, tmp_path, *SHORT) for place in range(3)]
    begun = entered(jobs[1], 3)
    lab[0].link(False)
    entered(jobs[1], 2, after=begun)
    assert jobs[0].wait() == 1
    assert "cut off from most of the others" in jobs[0].err
    (tmp_path / "end").touch()
    assert codes(jobs[1:]) == [0, 0], texts(jobs)
    learnt(tmp_path)
    all_gone(lab)


def test_followers_that_do_not_reach_each_other_do_not_both_lead(lab: Lab, tmp_path: Path) -> None:
    """Node 0 is killed after the link between the other two was cut: neither sees whether the other has ended."""
    jobs = [node(lab, place, tmp_path, *SHORT) for place in range(3)]
    begun = entered(jobs[1], 3)
    until((tmp_path / "1.0").exists, 60, "the first step")
    lab[1].part(lab[2], True)
    jobs[0].process.kill()
    assert jobs[2].wait(60) == 1, texts(jobs)
    assert "1 of 2 nodes are here, and node 1 cannot be reached: it may continue the run" in jobs[2].err
    assert "this node leads now" not in jobs[2].err
    entered(jobs[1], 1, after=begun)
    jobs[1].wait_for("this node leads now")
    (tmp_path / "end").touch()
    assert jobs[1].wait(60) == 0, texts(jobs)
    learnt(tmp_path)
    all_gone(lab)


def test_a_cut_between_followers_that_recovers_costs_no_node(lab: Lab, tmp_path: Path) -> None:
    jobs = [node(lab, place, tmp_path) for place in range(3)]
    begun = entered(jobs[1], 3)
    until((tmp_path / "1.0").exists, 60, "the first step")
    lab[1].part(lab[2], True)
    jobs[0].process.kill()
    jobs[2].wait_for("node 0 is lost")
    lab[1].part(lab[2], False)
    jobs[2].wait_for("node 1 (node2) leads now")
    entered(jobs[1], 2, after=begun)
    (tmp_path / "end").touch()
    assert codes(jobs[1:]) == [0, 0], texts(jobs)
    learnt(tmp_path)
    all_gone(lab)


def test_one_of_two_nodes_that_do_not_reach_each_other_is_dismissed(lab: Lab, tmp_path: Path) -> None:
    jobs = [node(lab, place, tmp_path, "--stall-timeout", "5s") for place in range(3)]
    begun = entered(jobs[0], 3)
    until((tmp_path / "1.0").exists, 60, "the first step")
    lab[1].part(lab[2], True)
    assert jobs[2].wait(60) == 1, texts(jobs)
    why = "node 1 (node2) and node 2 (node3) do not reach each other, though node 0 reaches both"
    assert f"{why}\n  this node was dismissed" in jobs[2].err
    entered(jobs[0], 2, after=begun)
    jobs[0].wait_for(f"node 2 (node3) was dismissed: {why}")
    (tmp_path / "end").touch()
    assert codes(jobs[:2]) == [0, 0], texts(jobs)
    learnt(tmp_path)
    all_gone(lab)


def test_a_leader_that_was_stopped_does_not_continue_beside_those_who_left_it(lab: Lab, tmp_path: Path) -> None:
    jobs = [node(lab, place, tmp_path, *SHORT) for place in range(3)]
    begun = entered(jobs[1], 3)
    jobs[0].signal(signal.SIGSTOP)
    entered(jobs[1], 2, after=begun)
    jobs[0].signal(signal.SIGCONT)
    assert jobs[0].wait() == 1
    assert "cut off from most of the others" in jobs[0].err
    (tmp_path / "end").touch()
    assert codes(jobs[1:]) == [0, 0], texts(jobs)
    learnt(tmp_path)
    all_gone(lab)


def test_a_group_that_forms_again_while_a_node_still_imports(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import os, time\nwhile not os.path.exists(os.environ['GO']): time.sleep(0.05)\n")
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]), "GO": str(tmp_path / "go")}
    jobs = [node(lab, place, tmp_path) for place in range(2)]
    jobs.append(node(lab, 2, tmp_path, "--preload", "slow", env=env))
    jobs[0].wait_for("comes to main", count=2)
    jobs[1].process.kill()
    log = Path(re.findall(r"output in (\S+)", jobs[0].err)[0], "events.jsonl")
    until(lambda: "node 1 (node2) is lost" in log.read_text(), 20, "the loss to be reported")
    (tmp_path / "go").touch()
    entered(jobs[2], 2)
    (tmp_path / "end").touch()
    assert codes([jobs[0], jobs[2]]) == [0, 0], texts(jobs)
    learnt(tmp_path)


def test_too_few_wait_for_another_with_what_they_have(lab: Lab, tmp_path: Path) -> None:
    jobs = [node(lab, place, tmp_path, nodes="2:3") for place in range(2)]
    begun = entered(jobs[0], 2)
    jobs[1].process.kill()
    jobs[0].wait_for("1 of at least 2 nodes are left: waiting 300 s")
    jobs[1] = node(lab, 1, tmp_path, nodes="2:3", env={"LAST": "1"})
    entered(jobs[0], 2, after=begun)
    (tmp_path / "end").touch()
    assert codes(jobs) == [0, 0], texts(jobs)
    assert (tmp_path / "last").exists()  # a rank that has not finished is not ended
    learnt(tmp_path)


def test_a_spare_node_stands_by(lab: Lab, tmp_path: Path) -> None:
    jobs = [node(lab, place, tmp_path, "--spares", "1", nodes="2") for place in range(3)]
    begun = entered(jobs[0], 2)
    jobs[2].wait_for("this node is a spare")
    jobs[1].signal(signal.SIGTERM)
    jobs[0].wait_for("node 1 (node2) leaves (SIGTERM)")
    entered(jobs[2], 2, after=begun)
    (tmp_path / "end").touch()
    assert codes(jobs) == [0, 143, 0], texts(jobs)
    learnt(tmp_path)


def test_a_plain_script_is_started_again_with_the_remaining_nodes(lab: Lab, tmp_path: Path) -> None:
    where = ("-n", "1:2", "-g", "1", "--cpu", "--fresh", "--master", lab[0].name)
    words = (script("until_file.py"), str(tmp_path / "end"))
    jobs = [lab[place].start("run", *where, "-i", str(place), *words) for place in range(2)]
    jobs[0].wait_for("ready 0")
    jobs[1].wait_for("ready 1")
    jobs[1].process.kill()
    jobs[0].wait_for("starting all ranks again")
    (tmp_path / "end").touch()
    assert jobs[0].wait() == 0, texts(jobs)
    all_gone(lab)


def test_the_leader_of_two_nodes_continues(lab: Lab, tmp_path: Path) -> None:
    """Neither can know whether the other still runs, so that one of them has to end."""
    jobs = [node(lab, place, tmp_path, *SHORT, nodes="1:2") for place in range(2)]
    begun = entered(jobs[0], 2)
    lab[1].link(False)
    entered(jobs[0], 1, after=begun)
    assert jobs[1].wait() == 1
    assert "1 of 2 nodes are here, and node 0 cannot be reached: it may continue the run" in jobs[1].err
    (tmp_path / "end").touch()
    assert jobs[0].wait(60) == 0, texts(jobs)
    learnt(tmp_path)
    all_gone(lab)
