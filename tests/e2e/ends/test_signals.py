"""Signals on several nodes: whichever node gets one, all end in the same way, and none waits for a node that has
left.
"""

from __future__ import annotations

import re
import signal
import time

from tests.e2e.jobs import PLAIN, all_gone, codes, texts, together
from tests.e2e.places import READY, script
from tests.kit.lab import Lab


def test_a_signal_at_one_member_ends_all_of_them(lab: Lab) -> None:
    jobs = together(lab, *PLAIN, script("sleepy.py"), ranks=(1, 1, 1))
    jobs[0].wait_for(READY, 3)
    jobs[1].signal(signal.SIGTERM)
    assert codes(jobs) == [143, 143, 143], texts(jobs)
    assert jobs[0].err.count("received SIGTERM") == 1
    all_gone(lab)


def test_ctrl_c_twice_at_a_member_is_at_once_everywhere(lab: Lab) -> None:
    jobs = together(lab, *PLAIN, script("ignore_term.py"), ranks=(1, 1, 1))
    jobs[0].wait_for(READY, 3)
    began = time.monotonic()
    jobs[1].signal(signal.SIGINT)
    jobs[1].wait_for("got SIGINT 1")
    jobs[1].signal(signal.SIGINT)
    assert codes(jobs) == [130, 130, 130], texts(jobs)
    assert time.monotonic() - began < 25  # the grace is 30 s
    all_gone(lab)


def test_a_member_that_goes_before_the_start_may_come_again(lab: Lab) -> None:
    """Ctrl-C works there while it waits for node 0, and does not end the other nodes."""
    words = ("-n", "3", "-g", "1", "--master", "node1", *PLAIN, script("hello.py"))
    leader = lab[0].start("run", "-i", "0", *words)
    member = lab[1].start("run", "-i", "1", *words)
    member.wait_for("joined node1")
    member.signal(signal.SIGINT)
    assert member.wait() == 130
    leader.wait_for("node 1 (node2) left before the start")
    others = [lab[place].start("run", "-i", str(place), *words) for place in (1, 2)]
    assert codes([leader, *others]) == [0, 0, 0], texts([leader, *others])


def test_ctrl_c_while_torch_is_imported_does_not_wait_for_it(lab: Lab) -> None:
    jobs = together(lab, "--cpu", script("allreduce.py"), ranks=(1, 1))
    jobs[1].wait_for("joined node1")
    began = time.monotonic()
    jobs[0].signal(signal.SIGINT)
    assert codes(jobs) == [130, 130], texts(jobs)
    assert time.monotonic() - began < 25  # the grace is 30 s
    all_gone(lab)


def test_usr1_at_node_0_reaches_the_workers_of_all_nodes(lab: Lab) -> None:
    jobs = together(lab, *PLAIN, script("grace.py"), ranks=(1, 1))
    jobs[0].wait_for("ready", 2)
    jobs[0].signal(signal.SIGUSR1)
    jobs[0].wait_for(re.compile(r"rank \d got SIGUSR1"), 2)
    jobs[0].signal(signal.SIGTERM)
    assert codes(jobs) == [143, 143], texts(jobs)
    for rank in range(2):
        assert jobs[0].out.count(f"rank {rank} got SIGUSR1") == 1
        assert jobs[0].out.count(f"rank {rank} saved") == 1


def test_usr1_is_not_given_to_workers_that_would_die_of_it(lab: Lab) -> None:
    jobs = together(lab, *PLAIN, script("sleepy.py"), ranks=(1, 1))
    jobs[0].wait_for(READY, 2)
    jobs[0].signal(signal.SIGUSR1)
    jobs[0].wait_for("SIGUSR1 received; no rank handles it, so it was not forwarded")
    jobs[0].signal(signal.SIGTERM)
    assert codes(jobs) == [143, 143], texts(jobs)
