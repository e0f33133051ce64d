"""`phalanx lint SCRIPT…`: finds, without running a script, what would make it hang or give wrong results."""

from __future__ import annotations

import argparse
import json
import sys

from phalanx.contract.visible import visible
from phalanx.lint.inspection import LintReport, inspect_all


def main(argv: list[str]) -> int:
    """Run `phalanx lint`. Return the exit code."""
    options = make_parser().parse_args(argv)
    report = inspect_all(options.script)
    if options.json:
        sys.stdout.write(json.dumps(_as_json(report), indent=1) + "\n")
    else:
        _show(report)
    return 2 if report.unreadable else 1 if report.findings else 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `phalanx lint`."""
    parser = argparse.ArgumentParser(
        prog="phalanx lint",
        description="Check scripts, without running or importing them, for code that hangs or gives wrong results on "
        "several ranks: where, why, and what to write instead. `# phalanx: ignore[rule]` on a line disables a rule "
        "there. Exit code 0: no findings; 1: findings; 2: a file cannot be read.",
    )
    parser.add_argument("script", nargs="+", metavar="SCRIPT", help="a file, or a folder: every .py file in it")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    return parser


def _as_json(report: LintReport) -> dict[str, object]:
    return {
        "files": report.files,
        "findings": [
            {name: getattr(one, name) for name in ("file", "line", "rule", "level", "reason", "fix")}
            for one in report.findings
        ],
        "unreadable": [{"file": file, "why": why} for file, why in report.unreadable],
    }


def _show(report: LintReport) -> None:
    for one in report.findings:
        text = f"{one.file}:{one.line}: {one.level} [{one.rule}]\n  {one.reason}\n  fix: {one.fix}\n"
        sys.stdout.write(visible(text))
    for file, why in report.unreadable:
        sys.stderr.write(f"phalanx: {visible(f'{file} cannot be checked: {why}')}\n")
    where = "1 file" if report.files == 1 else f"{report.files} files"
    if not report.findings:
        sys.stdout.write(f"nothing found in {where}\n" if report.files else "")
        return
    counts = {level: sum(one.level == level for one in report.findings) for level in ("error", "warning")}
    counted = [f"{count} {level}{'s' if count > 1 else ''}" for level, count in counts.items() if count]
    sys.stdout.write(f"\n{', '.join(counted)} in {where}\n")
