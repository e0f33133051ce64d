"""The findings that a check is expected to report."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.doctor.finding import Finding, worst

MIB = 1 << 20
GIB = 1 << 30


def lines(findings: Sequence[Finding]) -> str:
    return "\n".join(f"{finding.level}: {finding.node}: {finding.fact}: {finding.cause}" for finding in findings)


def expect(findings: Sequence[Finding], level: str, *words: str) -> None:
    assert worst(findings) == level, lines(findings)
    for word in words:
        assert word in lines(findings), lines(findings)
    for finding in findings:
        assert finding.level == "green" or finding.fix, f"nothing to type for: {finding}"
    assert "green" not in {finding.level for finding in findings} or worst(findings) == "green", lines(findings)
