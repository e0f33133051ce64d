"""Runs all rules over all files."""

from __future__ import annotations

import os
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from phalanx.errors import ScriptError
from phalanx.lint.finding import LintFinding
from phalanx.lint.model import Model
from phalanx.lint.rules.collectives import chance, collective, forward, group, loop
from phalanx.lint.rules.data import batch, epoch, sharding
from phalanx.lint.rules.processes import address, ending, nested_spawn
from phalanx.lint.rules.shared_resources import device, race, saving, terminal_input
from phalanx.lint.script import Script

RULES = {
    rule.NAME: rule
    for rule in (
        collective,
        group,
        forward,
        chance,
        loop,
        saving,
        device,
        terminal_input,
        epoch,
        sharding,
        batch,
        race,
        address,
        nested_spawn,
        ending,
    )
}


@dataclass(frozen=True)
class LintReport:
    """The findings of all files."""

    files: int  # number of files read
    findings: tuple[LintFinding, ...]
    unreadable: tuple[tuple[str, str], ...] = ()  # file, error


def inspect(text: str, file: str = "") -> list[LintFinding]:
    """Return the findings of a script. Raises SyntaxError or ValueError if it is not Python."""
    model = Model(Script(text))
    if not model.distributed:
        return []
    found = [finding for rule in RULES.values() for finding in rule.check(model) if not _ignored(model, finding)]
    return sorted((replace(one, file=file) for one in found), key=lambda one: (one.line, one.rule))


def _ignored(model: Model, finding: LintFinding) -> bool:
    lines = range(finding.line, max(finding.line, finding.last) + 1)
    silenced = frozenset[str]().union(*(model.script.ignored.get(line, ()) for line in lines))
    return bool(silenced & {"*", finding.rule})


def inspect_all(paths: Sequence[str]) -> LintReport:
    """Inspect files and folders."""
    files = list(dict.fromkeys(file for path in paths for file in _files(path)))
    found: list[LintFinding] = []
    unreadable = []
    for file in files:
        try:
            with tokenize.open(file) as opened:
                text = opened.read()
            found += inspect(text, file)
        except OSError as error:
            unreadable.append((file, error.strerror or str(error)))
        except SyntaxError as error:
            where = f"line {error.lineno}: " if error.lineno else ""
            unreadable.append((file, f"{where}not Python: {error.msg}"))
        except UnicodeDecodeError:
            unreadable.append((file, "not text"))
        except (RecursionError, MemoryError):
            unreadable.append((file, "too deeply nested"))
        except (ValueError, tokenize.TokenError) as error:
            unreadable.append((file, f"not Python: {error}"))
    return LintReport(len(files) - len(unreadable), tuple(found), tuple(unreadable))


def _files(path: str) -> Iterator[str]:
    if not os.path.isdir(path):
        if not os.path.exists(path):
            raise ScriptError(f"there is no file or folder {path}", fix="phalanx lint train.py")
        yield path
        return
    found = sorted(_in_folder(path))
    if not found:
        raise ScriptError(f"there is no Python file in {path}", fix="phalanx lint train.py")
    yield from found


def _in_folder(path: str) -> Iterator[str]:
    """Yield the files of a folder, without hidden ones and virtual environments."""
    for folder, folders, files in os.walk(path):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".")
            and name != "__pycache__"
            and not os.path.exists(os.path.join(folder, name, "pyvenv.cfg"))
        ]
        paths = (os.path.join(folder, name) for name in files if name.endswith(".py") and not name.startswith("."))
        yield from (path for path in paths if os.path.isfile(path))  # otherwise a pipe or a broken link
