"""Faults on one node whose end or message matters, and `phalanx chaos`. Most faults are in tests/chaos.

Nothing may be left behind: the fixtures of the kit check processes, shared memory and files after every test.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from phalanx.contract import events
from phalanx.launcher.chaos import Chaos, InjectedFault, faults
from tests.chaos import oracle
from tests.e2e.places import script
from tests.kit.cli import Env, Result, phalanx, start, until, warm_environment
from tests.kit.proc import below

pytestmark = pytest.mark.xdist_group("chaos")  # they share an undisturbed run
EPOCHS = 3
PLAIN = "import os, time, torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
LONG = 180  # seconds: a bound for hangs, not for slowness
places: dict[str, str | None] = {}  # of the warm fork server, while it exists


@pytest.fixture(scope="module", autouse=True)
def _warm() -> Iterator[None]:
    with warm_environment("torch._dynamo") as env:
        places.update(env)
        yield
        places.clear()


def words(folder: Path, *faults: list[Any], options: tuple[str, ...] = ()) -> tuple[str, ...]:
    return ("run", "-g", "2", "--cpu", *options, oracle.SCRIPT, str(folder), json.dumps(faults))


def trained(folder: Path, *faults: list[Any], options: tuple[str, ...] = (), env: Env | None = None) -> Result:
    """Run the training. Default `env`: torch is already imported."""
    env = {"EPOCHS": str(EPOCHS), **(places if env is None else env)}
    return phalanx(*words(folder, *faults, options=options), timeout=LONG, env=env)


def complete(folder: Path) -> None:
    """Check that the training equals that of an undisturbed run."""
    oracle.check(folder, 2, epochs=EPOCHS)


def printed_events(err: str) -> list[events.AnyEvent]:
    folder = Path(re.findall(r"output in (\S+)", err)[0])
    return [events.decode(line) for line in (folder / "events.jsonl").read_bytes().splitlines()]


def recoveries(err: str) -> list[tuple[str, ...]]:
    """Return the faults of every recovery, in order."""
    found: list[tuple[str, ...]] = []
    open_: list[str] = []
    for event in printed_events(err):
        if isinstance(event, events.FaultEvent):
            assert event.recovery == "regroup"
            open_.append(event.reason.partition(":")[0])
        elif isinstance(event, events.Recovered):
            assert 0 < event.seconds < LONG
            found.append(tuple(open_))
            open_ = []
    assert not open_
    return found


def replaced(err: str) -> list[str]:
    """Return the survivors that gloo did not release."""
    return re.findall(r"(rank \d) cannot leave the group.*: SIGKILL", err)


def recovered_from(err: str, *expected: tuple[str, ...]) -> None:
    """Check that the run recovered from these faults in order, and otherwise only from ranks that could not leave the
    group.
    """
    found = recoveries(err)
    assert len(found) == len(expected), found
    more = [Counter(ours) - Counter(theirs) for ours, theirs in zip(found, expected, strict=True)]
    assert all(Counter(theirs) <= Counter(ours) for ours, theirs in zip(found, expected, strict=True)), found
    assert sorted(who for each in more for who in each.elements()) == sorted(f"{who} failed" for who in replaced(err))


# -- ranks


def test_ranks_that_fail_together_are_one_fault(tmp_path: Path) -> None:
    done = trained(tmp_path, [5, 0, "raise"], [5, 1, "raise"], options=("--max-restarts", "1"))
    assert done.code == 0, done.err
    complete(tmp_path)
    ((*who,),) = recoveries(done.err)
    assert sorted(who) == ["rank 0 failed", "rank 1 failed"]


def test_a_silent_rank_is_named_and_gone_before_it_is_replaced(tmp_path: Path) -> None:
    done = trained(tmp_path, [5, 1, "stop"], options=("--worker-timeout", "4s"))
    assert done.code == 0, done.err
    complete(tmp_path)
    assert re.search(r"rank 1 is silent for \d+ s \(stopped\b.*\): SIGKILL", done.err)
    lives = [
        (event.pid, isinstance(event, events.WorkerStarted))
        for event in printed_events(done.err)
        if isinstance(event, events.WorkerStarted | events.WorkerExited) and event.rank == 1
    ]
    stopped = lives.index((lives[0][0], False))
    assert lives[stopped + 1][1]  # the next one starts after it


def test_no_regroup_at_the_beginning_and_at_the_end(tmp_path: Path) -> None:
    """Before a rank has connected, and after its training has ended, a death is handled as for any script: a clear end,
    or with restarts a new start, the second one from the last checkpoint.
    """
    faults = [[0, 0, "pause", "import", -1], [0, 1, "kill", "import", -1], [5, 1, "late"]]
    done = trained(tmp_path, *faults, options=("--max-restarts", "1", "--checkpoints", str(tmp_path / "kept")))
    assert done.code == 137
    assert "starting all ranks again: restart 1 of 1" in done.err
    assert "1 recovery was allowed, and is used up" in done.err
    complete(tmp_path)
    done = trained(tmp_path, *faults, options=("--checkpoints", str(tmp_path / "kept")))
    assert done.code == 0, done.err
    assert f"resumed at step {EPOCHS * oracle.EPOCH}" in done.out + done.err
    complete(tmp_path)


# -- other processes


def test_the_store_and_the_fork_server_are_killed(tmp_path: Path) -> None:
    """The store is killed during the training, without an effect; when the next group needs it; while that group forms.
    The fork server is killed, and every rank with it: the run continues from the disk, not from an incomplete save.
    """
    faults = [
        [3, 1, "store"],
        [6, 1, "kill"],
        [0, 1, "store", "join"],
        [0, 0, "kill", "save"],  # of step 8
        [18, 1, "forkserver"],
    ]
    options = ("--checkpoints", str(tmp_path / "kept"), "--checkpoint-every", "4")
    done = trained(tmp_path, *faults, options=options, env={**places, "PAUSE": "0.1"})
    assert done.code == 0, done.err
    complete(tmp_path)
    recovered_from(
        done.err,
        ("rank 1 failed", "the store was ended while the group formed"),
        ("rank 0 failed",),
        ("the fork server was lost",),
    )
    assert re.search(r"resumed at step (12|16)", done.out + done.err)
    assert len([event for event in printed_events(done.err) if isinstance(event, events.ForkServerReady)]) == 2


def test_ranks_outlive_their_fork_server_and_a_stopped_one_holds_nothing_up(tmp_path: Path) -> None:
    """The fork server is killed: all ranks continue. The store is stopped, and a rank dies: another group forms. The
    new fork server is stopped: Ctrl-C ends the run, with everything below it."""
    words_ = words(tmp_path, options=("--worker-timeout", "20s"))
    with start(*words_, env={"PAUSE": "0.1", "EPOCHS": "1000000"}) as job:

        def pids(kind: type[events.ForkServerReady] | type[events.WorkerStarted]) -> list[int]:
            return [event.pid for event in printed_events(job.err) if isinstance(event, kind)]

        def steps() -> int:
            return max((commit.step for commit in oracle.read(tmp_path)[1]), default=0)

        job.wait_for("output in", timeout=LONG)
        until(lambda: steps() > 3, LONG, "a few steps")
        workers = pids(events.WorkerStarted)
        os.kill(pids(events.ForkServerReady)[0], signal.SIGKILL)
        until(lambda: len(pids(events.ForkServerReady)) == 2, LONG, "another fork server")
        fork_server = pids(events.ForkServerReady)[1]
        before = steps()
        until(lambda: steps() > before + 3, LONG, "more steps")
        assert pids(events.WorkerStarted) == workers
        assert recoveries(job.err) == []
        assert "the fork server was lost: SIGKILL (Killed); its workers continue" in job.err
        (store,) = {*children(job.pid)} - {fork_server, *workers}
        os.kill(store, signal.SIGSTOP)
        os.kill(workers[1], signal.SIGKILL)
        until(lambda: any(isinstance(event, events.Recovered) for event in printed_events(job.err)), LONG, "a recovery")
        assert "the store process does not answer (stopped" in job.err
        os.kill(fork_server, signal.SIGSTOP)
        job.signal(signal.SIGINT)
        assert job.wait(LONG) == 130
    assert "stopped by Ctrl-C" in job.err


def test_a_spare_that_ends_while_its_fork_server_is_replaced_delays_no_end(tmp_path: Path) -> None:
    words_ = words(tmp_path, options=("--spares", "1", "--no-warm"))
    with start(*words_, env={"PAUSE": "0.1", "EPOCHS": str(EPOCHS)}) as job:

        def started() -> list[events.AnyEvent]:
            kinds = events.ForkServerReady | events.WorkerStarted
            return [event for event in printed_events(job.err) if isinstance(event, kinds)]

        job.wait_for("output in", timeout=LONG)
        until(lambda: len(started()) == 4, LONG, "a fork server, two ranks and a spare")
        pids = {type(event): event.pid for event in started()}  # the spare is the last worker
        os.kill(pids[events.ForkServerReady], signal.SIGKILL)
        job.wait_for("the fork server was lost")
        with contextlib.suppress(ProcessLookupError):  # before it has connected, it ends with its fork server
            os.kill(pids[events.WorkerStarted], signal.SIGKILL)
        assert job.wait(60) == 0
    complete(tmp_path)


STOPS = """
import os, signal
def stop_once(where):
    try:
        os.unlink(os.path.join(os.environ["STOPS"], where))
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGSTOP)
stop_once("import")
os.register_at_fork(after_in_child=lambda: stop_once("fork"))
"""


def test_replacements_that_stop_before_they_answer_are_replaced(tmp_path: Path) -> None:
    """These are stopped: a rank before it connects; a fork server while it imports; a store before its first heartbeat.
    Ctrl-C ends the run while a replacement is stopped.
    """
    (tmp_path / "stops.py").write_text(STOPS)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    env = {"PAUSE": "0.1", "EPOCHS": "1000000", "STOPS": str(tmp_path), "PYTHONPATH": path}
    options = ("--worker-timeout", "4s", "--preload", "stops", "--no-warm")
    with start(*words(tmp_path, options=options), env=env) as job:

        def count_of(kind: type[events.AnyEvent]) -> int:
            return sum(isinstance(event, kind) for event in printed_events(job.err))

        def steps() -> int:
            return max((commit.step for commit in oracle.read(tmp_path)[1]), default=0)

        def progress() -> None:
            before = steps()
            until(lambda: steps() > before + 3, LONG, "more steps")

        def pids() -> list[int]:
            """Return the pids of the fork server and of the ranks."""
            found = printed_events(job.err)
            ready = [event.pid for event in found if isinstance(event, events.ForkServerReady)]
            ranks = {event.rank: event.pid for event in found if isinstance(event, events.WorkerStarted)}
            return [ready[-1], ranks[0], ranks[1]]

        def stopped(where: str) -> None:
            until(lambda: not (tmp_path / where).exists(), LONG, f"a process to stop at its {where}")

        job.wait_for("output in", timeout=LONG)
        progress()
        (tmp_path / "fork").touch()
        os.kill(pids()[2], signal.SIGKILL)
        until(lambda: count_of(events.Recovered) == 1, LONG, "a recovery")
        assert re.search(r"rank 1 is silent for \d+ s \(stopped\): SIGKILL", job.err)

        fork_server, *ranks = pids()
        (store,) = {*children(fork_server)} - {*ranks}
        (tmp_path / "fork").touch()
        os.kill(store, signal.SIGKILL)
        silent = re.compile(r"the store process does not answer \(stopped for \d+ s\): SIGKILL")
        until(lambda: silent.search(job.err), LONG, "the message")
        os.kill(ranks[0], signal.SIGKILL)  # another group needs the store
        until(lambda: count_of(events.Recovered) == 2, LONG, "a recovery")

        (tmp_path / "import").touch()
        os.kill(fork_server, signal.SIGKILL)
        stopped("import")
        until(lambda: count_of(events.ForkServerReady) == 2, LONG, "a fork server that is ready")
        progress()
        (tmp_path / "import").touch()
        os.kill(pids()[0], signal.SIGKILL)
        stopped("import")
        job.signal(signal.SIGINT)
        assert job.wait(LONG) == 130
    assert "stopped by Ctrl-C" in job.err


JUMPY = """
import itertools, os, time
if "PHALANX_AGENT" in os.environ or "CLOCK" in os.environ:
    true, jumps = time.time, itertools.cycle((0.0, 90000.0, -90000.0))
    time.time = lambda: true() + next(jumps)
"""


def test_setting_the_clock_changes_nothing(tmp_path: Path) -> None:
    """A day forward and back, repeatedly: no restart is counted, and no rank counts as silent or slow."""
    (tmp_path / "sitecustomize.py").write_text(JUMPY)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    faults = [[3, 1, "kill"], [6, 0, "kill"], [9, 1, "kill"]]
    options = ("--max-restarts", "2", "--restart-window", "1h")
    done = trained(tmp_path, *faults, options=options, env={"PYTHONPATH": path, "CLOCK": "jumps"})
    assert done.code == 137, done.err
    assert "2 recoveries were allowed, and are used up" in done.err
    times = [event.time for event in printed_events(done.err)]
    assert max(times) - min(times) > 80000  # the clock did jump
    assert all(0 < float(took) < LONG for took in re.findall(r"committed ([\d.-]+) s later", done.err))


# -- scripts without phalanx


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_plain_script_whose_fork_server_is_killed_starts_again_if_it_may(tmp_path: Path) -> None:
    twice = write(
        tmp_path / "twice.py",
        PLAIN + "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "dist.barrier()\n"
        "if attempt == '0' and dist.get_rank() == 0: os.kill(os.getppid(), 9)\n"
        "if attempt == '0': time.sleep(600)\n"
        "print('attempt', attempt)\n",
    )
    done = phalanx("run", "-g", "2", "--cpu", "--max-restarts", "1", twice, timeout=LONG)
    assert done.code == 0, done.err
    assert done.out.count("attempt 1") == 2
    assert "the fork server was lost: SIGKILL (Killed); its workers ended with it" in done.err
    assert "starting all ranks again: restart 1 of 1" in done.err


def test_the_budget_fills_up_in_a_healthy_window_and_a_crash_that_repeats_does_not_wait_for_it(tmp_path: Path) -> None:
    well = write(
        tmp_path / "well.py",
        "import os, time\n"
        "time.sleep(1.2)\n"
        "if int(os.environ['TORCHELASTIC_RESTART_COUNT']) < 3: os.kill(os.getpid(), 9)\n",
    )
    healthy = ("--max-restarts", "1", "--restart-window", "1s")
    done = phalanx("run", "-g", "1", "--cpu", "--fresh", *healthy, well, timeout=LONG)
    assert done.code == 0, done.err
    assert done.err.count("restart 1 of 1") == 3
    done = phalanx("run", "-g", "1", "--cpu", "--fresh", "--max-restarts", "50", script("boom.py"), "0", timeout=LONG)
    assert done.code == 1
    assert "restart 2 of 50" in done.err
    assert "not retrying: the same failure 3 times with no progress" in done.err


# -- phalanx chaos


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("seed", "ranks", "kinds", "plan"),
    [
        (1, [0], ["kill"], [(0.63, 0, "kill"), (0.62, 0, "kill"), (1.15, 0, "kill")]),
        (1, [0, 1], ["kill", "stop"], [(0.63, 0, "stop"), (0.62, 1, "stop"), (1.15, 0, "kill"), (0.99, 1, "stop")]),
    ],
)
def test_the_plan_of_faults(seed: int, ranks: list[int], kinds: list[str], plan: list[tuple[float, int, str]]) -> None:
    first = list(itertools.islice(faults(seed, ranks, kinds, 1.0), len(plan)))
    assert [(round(fault.delay, 2), fault.rank, fault.kind) for fault in first] == plan
    slower = itertools.islice(faults(seed, ranks, kinds, 10.0), len(plan))
    assert [round(fault.delay, 1) for fault in slower] == [round(10 * fault.delay, 1) for fault in first]


@pytest.mark.smoke
def test_every_rank_and_every_kind_has_its_turn_and_no_seed_is_as_another() -> None:
    hundred = list(itertools.islice(faults(2, range(4), ("kill", "stop"), 2.0), 100))
    assert {(fault.rank, fault.kind) for fault in hundred} == set(itertools.product(range(4), ("kill", "stop")))
    assert all(1.0 <= fault.delay <= 3.0 for fault in hundred)
    assert hundred != list(itertools.islice(faults(3, range(4), ("kill", "stop"), 2.0), 100))
    assert isinstance(hundred[0], InjectedFault)


def test_chaos_injects_faults_and_reports_the_recoveries(tmp_path: Path) -> None:
    faults = ("--kill-every", "0.3s", "--seed", "1", "--faults", "kill,segv,store", "--times", "4")
    done = phalanx(
        "chaos", *faults, *words(tmp_path)[1:], timeout=LONG, env={**places, "PAUSE": "0.2", "EPOCHS": str(EPOCHS)}
    )
    assert done.code == 0, done.err
    complete(tmp_path)
    assert len(re.findall(r"chaos: fault \d, SIG\w+ to (?:rank \d|the store)", done.err)) == 4
    pattern = r"chaos: 4 faults \([\w, ]+\), seed 1: all recovered"
    assert re.search(pattern + "; the run ended with exit code 0", done.err)
    # The model behind page, screen and report has the number of the summary.
    (goodput,) = re.findall(r"s lost: goodput ([\d.]+%)", done.err)
    report = tmp_path / "report.html"
    result = phalanx("report", "-o", str(report), env=places)
    assert result.code == 0, result.err
    assert f"Goodput: {goodput}, the share of the time since the first step" in report.read_text()


@pytest.mark.parametrize("kinds", ["forkserver-stop+kill", "store-stop+forkserver+kill"])
def test_a_rank_is_replaced_although_its_fork_server_is_hit_at_the_same_moment(tmp_path: Path, kinds: str) -> None:
    """The replacement is ordered from a fork server whose end is not noticed yet."""
    faults = ("--kill-every", "0.3s", "--seed", "1", "--faults", kinds, "--times", "1", "--no-warm")
    done = phalanx(
        "chaos", *faults, *words(tmp_path)[1:], timeout=LONG, env={**places, "PAUSE": "0.2", "EPOCHS": str(EPOCHS)}
    )
    assert done.code == 0, done.err
    complete(tmp_path)
    assert f"chaos: 1 fault (1 {kinds}), seed 1: all recovered; the run ended with exit code 0" in done.err


def test_chaos_says_what_a_plain_script_needs(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain.py", PLAIN + "time.sleep(600)\n")
    faults = ("--kill-every", "0.5s", "--victims", "1")
    done = phalanx("chaos", "-g", "2", "--cpu", plain, *faults, timeout=LONG, env=places)
    assert done.code == 137
    assert re.search(r"chaos: 1 fault \(1 kill\), seed \d+: 0 recovered, 1 not", done.err)
    assert "one death ends all ranks: --max-restarts N starts them again" in done.err


def test_ctrl_c_ends_chaos_and_run(tmp_path: Path) -> None:
    options = ("--kill-every", "0.3s", "--seed", "3")
    with start("chaos", *options, *words(tmp_path)[1:], env={**places, "PAUSE": "5"}) as job:
        job.wait_for("chaos: fault 1", timeout=LONG)
        job.signal(signal.SIGINT)
        assert job.wait(LONG) == 130
    assert re.search(r"chaos: \d+ faults? .* the run ended with exit code 130", job.err)


@pytest.mark.smoke
def test_words_that_chaos_does_not_understand() -> None:
    behind = phalanx("chaos", script("hello.py"), "--kill-every", "5s", "and more")
    assert (behind.code, "fix: phalanx chaos --kill-every" in behind.err) == (2, True)
    unknown = phalanx("chaos", "--faults", "kill,earthquake", script("hello.py"))
    assert (unknown.code, '"earthquake" is none of kill, segv' in unknown.err) == (2, True)
    assert Chaos(seed=7).summary(0) == "chaos: no fault; the run ended with exit code 0"


@pytest.mark.timeout(3600)
def test_many_faults_in_a_row_and_nothing_grows(tmp_path: Path) -> None:
    """Rank 0 survives all faults, unless gloo does not release it once: it, the fork server and the agent use the same
    resources at the end as at the beginning.
    """
    count = int(os.environ.get("CHAOS_FAULTS", "16"))
    options = ("--kill-every", "0.2s", "--seed", "1", "--victims", "1", "--times", str(count))
    with start("chaos", *options, *words(tmp_path)[1:], env={"PAUSE": "0.05", "EPOCHS": "1000000"}) as job:

        def measured() -> dict[int, Size]:
            published = printed_events(job.err)
            fork_servers = [event.pid for event in published if isinstance(event, events.ForkServerReady)]
            ranks = [event.pid for event in published if isinstance(event, events.WorkerStarted) and event.rank == 0]
            return {pid: size(pid) for pid in (job.pid, fork_servers[-1], ranks[-1])}

        job.wait_for("chaos: fault 4,", timeout=3600)
        first = measured()
        job.wait_for(f"chaos: fault {count},", timeout=3600)
        # While it forks a rank, the fork server has a few more.
        last = until(
            lambda: (now := measured()) and not grown(first, now, count) and now, 20, "what had grown to shrink"
        )
        assert len(first.keys() & last.keys()) >= (2 if replaced(job.err) else 3)
        job.signal(signal.SIGINT)
        assert job.wait(60) == 130
    assert re.search(rf"chaos: {count} faults .* (all|{count - 1}) recovered", job.err)


class Size(NamedTuple):
    descriptors: int
    threads: int
    memory: int  # kB of private memory


def size(pid: int) -> Size:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return Size(len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"]), int(status["RssAnon"].split()[0]))


def grown(first: dict[int, Size], last: dict[int, Size], count: int) -> list[tuple[Size, Size]]:
    found = []
    for before, after in ((first[pid], last[pid]) for pid in first.keys() & last.keys()):
        most = Size(before.descriptors + 3, before.threads + 1, before.memory + 1024 + 80 * count)  # shared pages, too
        if any(now > limit for now, limit in zip(after, most, strict=True)):
            found.append((before, after))
    return found


def children(pid: int) -> list[int]:
    return [process.pid for process in below(pid) if process.parent == pid and not process.dead]
