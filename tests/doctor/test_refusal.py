"""The messages of `phalanx run` when it cannot start, as findings; and how they are wrapped."""

from __future__ import annotations

import pytest

from phalanx.contract import error_report
from phalanx.doctor import pairs, refusal, report
from phalanx.doctor.finding import Finding
from phalanx.doctor.pairs import HostPair
from phalanx.errors import JoinError, PhalanxError, UsageError
from phalanx.launcher.remote import ssh_errors
from phalanx.launcher.remote.node_spec import NodeRefused

FAR = NodeRefused(what="ssh cannot connect", details=("ssh: No route to host",), fix="ssh c true")
ODD = NodeRefused(what="it has other versions", details=("torch is 1.13 there", "nccl is missing there"), fix="")


def red(fact: str, cause: str, fix: str, node: str = "") -> Finding:
    return Finding("start", "red", fact, cause, fix, node)


AGAIN = "phalanx run says the same, with the same hosts"
OF_FAR = red("ssh cannot connect", "ssh: No route to host", "ssh c true", "c")
OF_ODD = red("it has other versions", "torch is 1.13 there; nccl is missing there", AGAIN, "b@x")


def line_of(error: PhalanxError) -> bytes:
    return error_report.line(error).encode()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (line_of(ssh_errors.combined({"c": FAR})), [OF_FAR]),
        (b"Welcome\nphalanx: prose\n" + line_of(ssh_errors.combined({"b@x": ODD, "c": FAR}, 3)), [OF_ODD, OF_FAR]),
        (b"phalanx: a note\n" + line_of(JoinError("no", fix="yes")) + b"srun: error", [red("no", "", "yes")]),
        (b"0: " + line_of(UsageError("x", details=["y"])) * 2, [red("x", "y", AGAIN)]),
        (line_of(UsageError("a\nb \udcff")), [red("a\nb \\xff", "", AGAIN)]),
        (b"phalanx: prose\n  fix: is not read\nphalanx-error {broken\n", []),
        (b"", []),
    ],
)
def test_errors_of_a_run(text: bytes, found: list[Finding]) -> None:
    assert refusal.findings(error_report.find(text)) == found


@pytest.mark.parametrize(("environ", "written"), [({}, False), ({"PHALANX_ERROR_FORMAT": "json"}, True)])
def test_the_line_is_written_only_if_asked_for(
    environ: dict[str, str], written: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    error_report.write(JoinError("no", fix="yes"), environ)
    assert [one.fix for one in error_report.find(capsys.readouterr().err.encode())] == ["yes"] * written


def test_lines_begin_below_where_the_text_began() -> None:
    text = "one two three https://example.org/a-very-long-path four"
    assert report.wrapped(text, 0, 10, 4) == [text]
    assert report.wrapped(text, 24, 10, 4) == ["one two three", "    https://example.org/a-very-long-path", "    four"]
    assert report.wrapped("", 24, 10, 4) == [""]


def test_links_that_are_measured_again_are_those_complained_about() -> None:
    good = [HostPair("a", "b", 1e-4, 1e9, 1e9), HostPair("a", "c", 1e-4, 1e9, 1e9), HostPair("a", "d", 1e-4, 1e9, 1e9)]
    slow, late = HostPair("b", "c", 1e-4, 1e8, 1e8), HostPair("b", "d", 1e-2, 1e9, 1e9)
    uneven, local = HostPair("c", "d", 1e-4, 1e9, 1e8), HostPair("d", "e", 1, 1, 1, local=True)
    assert pairs.doubtful(good) == []
    assert pairs.doubtful([*good, slow, late, uneven, local]) == [slow, late, uneven]
