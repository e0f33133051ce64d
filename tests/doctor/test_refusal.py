"""What `phalanx run` says when it does not start, as findings; and how they are wrapped."""

from __future__ import annotations

import pytest

from phalanx.doctor import pairs, refusal, report
from phalanx.doctor.finding import Finding
from phalanx.doctor.pairs import Pair
from phalanx.errors import JoinError
from phalanx.launch.remote import ssh
from phalanx.launch.remote.node_spec import NodeRefused

FAR = NodeRefused(what="ssh cannot connect", details=("ssh: No route to host",), fix="ssh c true")
ODD = NodeRefused(what="it has other versions", details=("torch is 1.13 there", "nccl is missing there"), fix="")
HOSTS = ("a", "b@x", "c")


def red(fact: str, cause: str, fix: str, node: str = "") -> Finding:
    return Finding("start", "red", fact, cause, fix, node)


AGAIN = "phalanx run says the same, with the same hosts"
OF_FAR = red("ssh cannot connect", "ssh: No route to host", "ssh c true", "c")
OF_ODD = red("it has other versions", "torch is 1.13 there; nccl is missing there", AGAIN, "b@x")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"phalanx: {ssh.combined({'c': FAR})}", [OF_FAR]),
        (f"Welcome\nphalanx: {ssh.combined({'b@x': ODD, 'c': FAR}, 3)}\n", [OF_ODD, OF_FAR]),
        (f"phalanx: a note\nphalanx: {JoinError('no', fix='yes')}\nsrun: error", [red("no", "", "yes")]),
        ("phalanx: the end", [red("the end", "", AGAIN)]),
        ("phalanx: x\n  y\nphalanx: x\n  y", [red("x", "y", AGAIN)]),
        ("2 of 3\n  nobody said this", []),
        ("phalanx: 2 of 3 hosts cannot take part\n  who?", [red("2 of 3 hosts cannot take part", "who?", AGAIN)]),
        ("", []),
    ],
)
def test_words_of_a_run(text: str, found: list[Finding]) -> None:
    assert refusal.findings(text, HOSTS) == found


def test_lines_begin_below_where_the_text_began() -> None:
    text = "one two three https://example.org/a-very-long-path four"
    assert report.wrapped(text, 0, 10, 4) == [text]
    assert report.wrapped(text, 24, 10, 4) == ["one two three", "    https://example.org/a-very-long-path", "    four"]
    assert report.wrapped("", 24, 10, 4) == [""]


def test_links_that_are_measured_again_are_those_complained_about() -> None:
    good = [Pair("a", "b", 1e-4, 1e9, 1e9), Pair("a", "c", 1e-4, 1e9, 1e9), Pair("a", "d", 1e-4, 1e9, 1e9)]
    slow, late = Pair("b", "c", 1e-4, 1e8, 1e8), Pair("b", "d", 1e-2, 1e9, 1e9)
    uneven, local = Pair("c", "d", 1e-4, 1e9, 1e8), Pair("d", "e", 1, 1, 1, local=True)
    assert pairs.doubtful(good) == []
    assert pairs.doubtful([*good, slow, late, uneven, local]) == [slow, late, uneven]
