from __future__ import annotations

import socket
from pathlib import Path

from tests.kit import ports
from tests.kit.cli import PYTHON, run


def test_no_port_is_given_twice_and_none_that_the_kernel_chooses() -> None:
    code = "from tests.kit.ports import free_port; print(*(free_port() for _ in range(50)))"
    other = {int(word) for word in run((*PYTHON, "-c", code)).out.split()}
    own = {ports.free_port() for _ in range(50)}
    assert len(own) == len(other) == 50
    assert own.isdisjoint(other)
    assert max(own | other) < int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def test_a_port_that_is_taken_is_passed_over() -> None:
    first = ports.free_port()
    with socket.socket() as taken:
        taken.bind(("", first + 1))
        assert ports.free_port() == first + 2
