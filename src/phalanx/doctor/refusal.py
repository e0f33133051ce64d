"""Turns the errors with which `phalanx run` failed to start the test into findings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from phalanx.contract.error_report import ErrorReport, HostProblem
from phalanx.doctor.finding import Finding

CHECK = "start"


def findings(reports: Iterable[ErrorReport]) -> list[Finding]:
    """Return one finding per error, or one per host if an error is about several hosts."""
    return list(dict.fromkeys(finding for report in reports for finding in _of(report)))


def _of(report: ErrorReport) -> Iterator[Finding]:
    for one in report.hosts or (report,):
        yield Finding(
            CHECK,
            "red",
            one.what,
            "; ".join(line.strip() for line in one.details),
            one.fix or "phalanx run says the same, with the same hosts",
            one.host if isinstance(one, HostProblem) else "",
        )
