"""Faults of whole nodes, on three hosts made of network namespaces.

Two nodes train and the third is a spare, so that the number of ranks is constant and the result is bit-identical to an
undisturbed run. A lost node joins again as the spare.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.chaos import oracle
from tests.chaos.campaign import Round, RoundResult
from tests.kit.cli import Env, until
from tests.kit.handle import Handle
from tests.kit.lab import Lab

FORK_SERVER = "warm_main.py"
LEADS = "this node leads now"
SHORT = ("--node-timeout", "4s")


@dataclass
class NodeGroup:
    """The nodes of a round, and the run on each of them."""

    this: Round
    lab: Lab
    env: Env
    options: tuple[str, ...]
    leader: int = 0
    jobs: dict[int, Handle] = field(default_factory=dict)

    def start(self, place: int) -> None:
        where = ("-i", str(place), "-g", "1", "--cpu", "--master", self.lab[self.leader].name)
        words = ("run", *where, *SHORT, *self.options, oracle.SCRIPT, str(self.this.folder), "[]")
        self.jobs[place] = self.lab[place].start(*words, env=self.env)

    def seconds_after(self, at: float, ranks: int) -> float:
        """Wait until a new group of this many ranks has committed a step. Return the seconds since `at`."""

        def took() -> float | None:
            return oracle.delay(self.this.folder, at, ranks)

        return until(took, oracle.LONG / 4, f"a step of {ranks} ranks\n{self.texts()}") or 0.0

    def end(self) -> None:
        """End the training at the next epoch, and check that all nodes succeed."""
        (self.this.folder / "end").touch()
        codes = {place: job.wait(oracle.LONG / 4) for place, job in sorted(self.jobs.items())}
        assert set(codes.values()) == {0}, f"exit codes {codes}\n{self.texts()}"

    def texts(self) -> str:
        return "\n".join(f"--- node {place}\n{job.both[-3000:]}" for place, job in sorted(self.jobs.items()))


@contextlib.contextmanager
def node_group(this: Round, *options: str, **variables: str) -> Iterator[NodeGroup]:
    """Yield three nodes with torch already imported. Nothing may be left on them at the end."""
    home, tmp = this.folder / "home", this.folder / "tmp"
    tmp.mkdir()
    env = {"TMPDIR": str(tmp), "PHALANX_HOME": str(home), "OMP_NUM_THREADS": "1", "PAUSE": "0.02", **variables}
    with Lab(3) as lab:
        made = [node.start("warm", "--preload", "phalanx.train.main", env=env) for node in lab]
        for job in made:
            assert job.wait(60) == 0, job.both
        found = NodeGroup(this, lab, env, options)
        try:
            yield found
            until(lambda: not _left(lab), 15, "no process or shared memory to be left on any node")
        except AssertionError as error:
            raise AssertionError(f"{error}\nleft: {_left(lab)}\n{found.texts()}") from None
        finally:
            for job in (*made, *found.jobs.values()):
                job.end()


def _left(lab: Lab) -> list[str]:
    processes = [
        f"{node.name}: {command}" for node in lab for _, command in node.processes() if FORK_SERVER not in command
    ]
    return processes + [f"{node.name}: /dev/shm/{name}" for node in lab for name in node.shared_memory()]


def kill(nodes: NodeGroup, place: int) -> None:
    """Kill the agent alone, or everything on the node."""
    if nodes.this.chance.random() < 0.5:
        nodes.jobs[place].signal(signal.SIGKILL)
    else:
        nodes.lab[place].kill()


def cut(nodes: NodeGroup, place: int) -> None:
    nodes.lab[place].link(False)


def stop(nodes: NodeGroup, place: int) -> None:
    nodes.jobs[place].signal(signal.SIGSTOP)


def lost(fault: Callable[[NodeGroup, int], None], *, leads: bool) -> Callable[[Round], RoundResult]:
    """One of the two training nodes is lost, the spare replaces it, and the lost one joins again as a spare."""

    def run_round(this: Round) -> RoundResult:
        seconds = []
        with node_group(this, "-n", "2", "--spares", "1") as nodes:
            for place in range(3):
                nodes.start(place)
            training, spare = [0, 1], 2
            nodes.jobs[spare].wait_for("this node is a spare", timeout=60)
            nodes.seconds_after(0.0, 2)
            for _ in range(this.faults):
                time.sleep(this.chance.uniform(0.0, 0.5))  # the random moment is the point
                (victim,) = [place for place in training if (place == nodes.leader) == leads]
                at = time.time()
                fault(nodes, victim)
                seconds.append(nodes.seconds_after(at, 2))
                _leave(nodes, victim)
                if leads:
                    nodes.leader = _leader(nodes, victim)
                training, spare = sorted({*training, spare} - {victim}), victim
                nodes.start(victim)
                nodes.jobs[victim].wait_for("this node is a spare", timeout=60)
            nodes.end()
            oracle.check(this.folder, 2)
        return RoundResult(this.faults, this.faults, seconds)

    return run_round


def _leave(nodes: NodeGroup, place: int) -> None:
    """Let the lost node run again, if it still can: it detects that the others have dismissed it, and ends."""
    nodes.lab[place].link(True)
    with contextlib.suppress(ProcessLookupError):
        os.kill(nodes.jobs[place].pid, signal.SIGCONT)
    code = nodes.jobs[place].wait(oracle.LONG / 4)
    assert code in (1, -signal.SIGKILL), f"the lost node ended with {code}\n{nodes.texts()}"
    nodes.jobs[place].end()


def _leader(nodes: NodeGroup, gone: int) -> int:
    (found,) = [place for place, job in nodes.jobs.items() if place != gone and LEADS in job.both]
    return found


def parted(this: Round) -> RoundResult:
    """Two of three nodes cannot reach each other, though node 0 reaches both: one of them is dismissed, and may come
    back. Other numbers of ranks round differently: the parameters are close to those of an undisturbed run."""
    seconds = []
    with node_group(this, "-n", "1:3", "--stall-timeout", "5s", DROPOUT="0") as nodes:
        for place in range(3):
            nodes.start(place)
        nodes.seconds_after(0.0, 3)
        for number in range(this.faults):
            at = time.time()
            nodes.lab[1].part(nodes.lab[2], True)
            seconds.append(nodes.seconds_after(at, 2))
            dismissed = until(lambda: [place for place in (1, 2) if nodes.jobs[place].process.poll() is not None], 60)
            nodes.lab[1].part(nodes.lab[2], False)
            for place in dismissed:
                assert re.search("do not reach each other", nodes.jobs[place].err), nodes.texts()
                nodes.jobs[place].end()
                nodes.start(place)
            nodes.seconds_after(time.time(), 3)
            assert len(dismissed) == 1, f"fault {number + 1}: nodes {dismissed} ended\n{nodes.texts()}"
        nodes.end()
        close(this)
        # The time before the dismissal is part of its cost.
        dismissals = re.findall(r"was dismissed; regrouped, .*after \d+ s without a step", nodes.jobs[0].both)
        assert len(dismissals) == this.faults, nodes.texts()
    return RoundResult(this.faults, this.faults, seconds)


def close(this: Round) -> None:
    """Check: each sample once per epoch, equal ranks at the end, and parameters that differ only by rounding."""
    steps, parameters = json.loads((this.folder / "end.0").read_text())
    assert all(json.loads(path.read_text()) == [steps, parameters] for path in this.folder.glob("end.*"))
    oracle.check_samples(oracle.read(this.folder)[0], steps)
    for name, values in oracle.undisturbed(3, steps // oracle.EPOCH, "0").items():
        pairs = zip(parameters[name], values, strict=True)
        assert all(math.isclose(one, two, rel_tol=1e-3, abs_tol=1e-4) for one, two in pairs), name
